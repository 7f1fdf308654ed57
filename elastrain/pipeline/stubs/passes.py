"""One micro-batch through the blocks `[begin, end)` of this member: what came in, what goes out, and the way back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.draws import BackwardDraws
from elastrain.pipeline.stubs.fakes import copy_of
from elastrain.pipeline.stubs.naming import is_fake

SAME = (
    "the forward has to enter the same blocks with the same tensors in each micro-batch; "
    "where it leaves layers out at random, switch that off (layerdrop=0)"
)


class ReceivedCopy(torch.autograd.Function):
    """A received tensor as a copy that is no leaf: blocks may begin in place, and what was received stays as it is."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, gradients: dict[int, Tensor], index: int) -> Tensor:
        ctx.gradients, ctx.index = gradients, index
        return copy_of(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # With its strides, as the block before takes it in one worker: a leaf's .grad would have those of the leaf.
        ctx.gradients[ctx.index] = gradients[0]
        return None, None, None


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

    def __init__(self, coming: Sequence[int], going: Sequence[int], received: Sequence[Tensor | None]) -> None:
        """coming, going: numbers of what crosses the cut above and the one below, in the order in which it is sent.

        `received`: None for what this micro-batch does without. Raises ValueError where another number was received.
        """
        if len(received) != len(coming):
            raise ValueError(f"{len(coming)} tensors cross the cut; {len(received)} were received")
        self.received = tuple(t if t is None else t.detach().requires_grad_(t.requires_grad) for t in received)
        self._gradients: dict[int, Tensor] = {}
        """By place among what was received."""
        self._entered: dict[int, Tensor] = {}
        self._coming = {number: index for index, number in enumerate(coming)}
        self._going = dict.fromkeys(going)
        self._collected: dict[int, tuple[Tensor, int, str]] = {}
        """With its version, and the block that took it first."""
        self._returned: dict[int, tuple[Tensor, list[int]]] = {}
        """By id: a tensor that a block returned, and its numbers: some blocks return what they take."""
        self._given: dict[int, tuple[object, Tensor | None]] = {}
        """By id: a fake, and the received tensor that stands for it in this micro-batch; None if it is made behind."""
        self._at: dict[tuple[int, int], dict[int, Tensor]] = {}
        """By place and index of the argument: the received tensors that a block was given there, by id."""
        self.entries: Counter[int] = Counter()
        """By place: how often the forward has entered the block."""
        self._autocast: AutocastState | None = None
        self.draws: BackwardDraws | None = None
        """What its backward may draw, once the forward is over."""

    def enter(self, place: int) -> int:
        """The forward enters a block; how often it has entered it before."""
        self.entries[place] += 1
        return self.entries[place] - 1

    def returned(self, leaves: Sequence[object], numbers: Mapping[int, int], *, is_behind: bool) -> None:
        """A block has returned these. `numbers`: by index, what they are in the tracing pass.

        is_behind: it is computed behind this member's blocks.
        """
        if is_behind:
            self._given |= {id(leaf): (leaf, None) for leaf in leaves}
        for index, number in numbers.items():
            leaf = leaves[index] if index < len(leaves) else None
            if isinstance(leaf, Tensor) and (number in self._coming or number in self._going):
                self._returned.setdefault(id(leaf), (leaf, []))[1].append(number)

    def give(self, fake: Tensor, numbers: Sequence[int], at: tuple[int, int]) -> Tensor | None:
        """The received tensor in place of a fake: that of the same fake before, else the one with its number.

        `numbers`: of what it may be, by what the tracing pass saw `at` this place and argument. None if it does not
        come in.
        """
        if id(fake) not in self._given:
            number = next(iter(self._numbers(fake, numbers, self._coming)), None)
            entered = None if number is None else self.entered(number)
            if entered is None:
                return None
            self._given[id(fake)] = fake, entered
        found = self._given[id(fake)][1]
        if found is not None:
            self._at.setdefault(at, {})[id(found)] = found
        return found

    def give_again(self, fake: Tensor, at: tuple[int, int]) -> Tensor | None:
        """The same where a checkpoint calls, maybe with another fake: torch hands out copies under saved-tensor hooks,
        such as those of offloading, and code before the block makes its tensors anew.

        Then it is what the block took there in the forward, or None where that were several tensors.
        """
        if id(fake) in self._given:
            return self._given[id(fake)][1]
        taken = list(self._at.get(at, {}).values())
        return taken[0] if len(taken) == 1 else None

    def _numbers(self, tensor: Tensor, numbers: Sequence[int], crossing: Mapping[int, object]) -> list[int]:
        """What a block returned keeps its numbers wherever it goes; others have those of the tracing pass there."""
        _, own = self._returned.get(id(tensor), (None, []))
        return [n for n in own if n in crossing] or [n for n in numbers if n in crossing][:1]

    def entered(self, number: int) -> Tensor | None:
        """The received tensor with the number, once for all blocks that take it; None if it does not come in."""
        index = self._coming.get(number)
        leaf = None if index is None else self.received[index]
        if index is None or leaf is None:
            return None
        if number not in self._entered:
            entered: Tensor = ReceivedCopy.apply(leaf, self._gradients, index) if leaf.requires_grad else copy_of(leaf)  # type: ignore[no-untyped-call]  # of torch
            self._entered[number] = entered
        return self._entered[number]

    def collect(self, tensor: Tensor, numbers: Sequence[int], at: tuple[int, int], block: str) -> None:
        """A block behind this member's takes it. Raises ConfigError where that is not what others know by its number.

        Whoever makes a tensor sees all who take it. Who receives it is given one by its number, and cannot see that.
        """
        is_behind = self._given.get(id(tensor), (None, tensor))[1] is None
        for each in () if is_behind else self._numbers(tensor, numbers, self._going):
            # A fake may only pass through: then what came in goes on.
            found = self.give(tensor, [each, *numbers], at) if is_fake(tensor) else tensor
            if found is None or self._collected.setdefault(each, (found, found._version, block))[0] is not found:
                raise ConfigError(f"block {block!r} takes another tensor than in the tracing pass: {SAME}")

    @property
    def going(self) -> tuple[Tensor | None, ...]:
        """What crosses the cut below, in the order in which it is sent; None for what no block has taken.

        Raises ConfigError where a tensor was changed after a block had taken it.
        """
        for tensor, version, block in self._collected.values():
            if tensor._version != version:
                raise ConfigError(f"code changes in place, behind block {block!r}, what that block has taken: {SAME}")
        return tuple(self._collected.get(number, (None,))[0] for number in self._going)

    def backward_is_called(self, device: str = "cpu") -> None:
        """Remember the autocast state in which the user's loop calls `step.backward`."""
        self._autocast = AutocastState(device)

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Backward of a member without the loss. `gradients`: of `going`, None where there is none."""
        pairs = [
            (tensor, gradient)
            for tensor, gradient in zip(self.going, gradients, strict=True)
            if tensor is not None and gradient is not None and tensor.requires_grad
        ]
        assert self._autocast is not None, "step.backward was called in this pass before"
        if pairs:
            with self._autocast.again():
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        """Of what was received, in its order: what goes over the cut above once the backward is done."""
        return tuple(self._gradients.get(index) for index in range(len(self.received)))
