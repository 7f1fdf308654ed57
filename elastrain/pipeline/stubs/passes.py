"""One micro-batch through the blocks `[begin, end)` of this member: what came in, what goes out, and the way back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.backward_draws import BackwardDraws
from elastrain.pipeline.stubs.fakes import copy_of


class _Entered(torch.autograd.Function):
    """A received tensor as a copy that is no leaf: blocks may begin in place, and what was received stays as it is."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return copy_of(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


class AutocastState:
    """Autocast as it was at one moment: a backward runs under the state of the call, wherever it is repeated."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.is_on = torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device)
        self.is_cached = torch.is_autocast_cache_enabled()

    def again(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.is_on, cache_enabled=self.is_cached)


class StubPass:
    """A forward under way, or one whose backward is to come. Tensors go by the numbers of the trace."""

    def __init__(self, coming: Sequence[int], going: Sequence[int], received: Sequence[Tensor]) -> None:
        """coming, going: numbers of what crosses the cut above and the one below, in the order in which it is sent.

        Raises ValueError where another number of tensors was received.
        """
        if len(received) != len(coming):
            raise ValueError(f"{len(coming)} tensors cross the cut; {len(received)} were received")
        self.received = tuple(each.detach().requires_grad_(each.requires_grad) for each in received)
        """Leaves; the gradients of those that require one are the boundary gradients of the cut above."""
        self._entered: dict[int, Tensor] = {}
        self._coming = {number: index for index, number in enumerate(coming)}
        self._going = tuple(going)
        self._collected: dict[int, Tensor] = {}
        self._entries: Counter[int] = Counter()
        self._autocast: AutocastState | None = None
        self.draws: BackwardDraws | None = None
        """What its backward may draw, once the forward is over."""

    def enter(self, place: int) -> int:
        """The forward enters a block; how often it has entered it before."""
        self._entries[place] += 1
        return self._entries[place] - 1

    def entered(self, number: int) -> Tensor | None:
        """The received tensor in place of the fake, once for all blocks that take it; None if it does not come in."""
        index = self._coming.get(number)
        if index is None:
            return None
        if number not in self._entered:
            leaf = self.received[index]
            entered: Tensor = _Entered.apply(leaf) if leaf.requires_grad else copy_of(leaf)  # type: ignore[no-untyped-call]  # of torch
            self._entered[number] = entered
        return self._entered[number]

    def collect(self, number: int, tensor: Tensor) -> None:
        """A block behind this member's takes it."""
        self._collected.setdefault(number, tensor)

    @property
    def going(self) -> tuple[Tensor, ...]:
        """What crosses the cut below, in the order in which it is sent.

        Raises ConfigError where the forward took another way than in the tracing pass.
        """
        lacking = [number for number in self._going if number not in self._collected]
        if lacking:
            raise ConfigError(
                f"{len(lacking)} of {len(self._going)} tensors that crossed the cut in the tracing pass were not made: "
                "the forward has to enter the same blocks with the same tensors in each micro-batch"
            )
        return tuple(self._collected[number] for number in self._going)

    def backward_is_called(self, device: str = "cpu") -> None:
        """Remember the autocast state in which the user's loop calls `step.backward`."""
        self._autocast = AutocastState(device)

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Backward of a member without the loss. `gradients`: of `going`, None where there is none."""
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(self.going, gradients, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        assert self._autocast is not None, "step.backward was called in this pass before"
        if pairs:
            with self._autocast.again():
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        """Of what was received, in its order: what goes over the cut above once the backward is done."""
        return tuple(leaf.grad for leaf in self.received)
