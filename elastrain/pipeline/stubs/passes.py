"""One micro-batch through the blocks `[begin, end)` of this member: received tensors, tensors to send, and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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


Ends = Sequence[tuple[Tensor, Tensor | None]]
"""The tensors at which a backward begins, each with its gradient. A loss has none."""


class ReceivedCopy(torch.autograd.Function):
    """An autograd function that copies a received tensor, so that blocks may change it in place.

    The result is no leaf of autograd, and the received tensor stays as it is.
    """

    @staticmethod
    def forward(ctx: Any, received: Tensor, gradients: dict[int, Tensor], index: int) -> Tensor:
        """Return a copy of the received tensor."""
        ctx.gradients, ctx.index = gradients, index
        return copy_of(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Store the gradient by index."""
        # Kept with its strides, as the block before gets it in one worker. A leaf's .grad would have the strides of the
        # leaf.
        ctx.gradients[ctx.index] = gradients[0]
        return None, None, None


class AutocastState:
    """The autocast state at one moment. A backward runs under the state of its call, wherever it is repeated."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.is_on = torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device)
        self.is_cached = torch.is_autocast_cache_enabled()

    def again(self) -> torch.autocast:
        """Return a context manager that sets the state again."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.is_on, cache_enabled=self.is_cached)


class StubPass:
    """One micro-batch on this member, from its forward to its backward. Tensors have the numbers of the trace."""

    def __init__(
        self,
        coming: Sequence[int],
        going: Sequence[int],
        received: Sequence[Tensor | None],
        entered_at: Callable[[int], None] = lambda place: None,
    ) -> None:
        """Take the received tensors.

        Args:
            coming: Numbers of the tensors that cross the cut above, in the order in which they are sent.
            going: Numbers of the tensors that cross the cut below, in the same kind of order.
            received: A tensor for each of `coming`; None if this micro-batch does not have it.
            entered_at: Called with the place of each block that the forward enters, before the block computes.

        Raises:
            ValueError: If the number of received tensors is wrong.
        """
        if len(received) != len(coming):
            raise ValueError(f"{len(coming)} tensors cross the cut; {len(received)} were received")
        self.received = tuple(t if t is None else t.detach().requires_grad_(t.requires_grad) for t in received)
        self._gradients: dict[int, Tensor] = {}
        """Gradients by index in `received`."""
        self._entered: dict[int, Tensor] = {}
        self._coming = {number: index for index, number in enumerate(coming)}
        self._collected: dict[int, tuple[Tensor, int, str] | None] = dict.fromkeys(going)
        """By number: a tensor that goes out, its version, and the block that took it first; None before that."""
        self._returned: dict[int, tuple[Tensor, list[int]]] = {}
        """By id: a tensor that a block returned, and its numbers. It may have several, because some blocks return an
        argument.
        """
        self._given: dict[int, tuple[object, Tensor | None]] = {}
        """By id: a fake, and the received tensor that replaces it in this micro-batch; None if a block below makes it.
        """
        self._at: dict[tuple[int, int], dict[int, Tensor]] = {}
        """By (place, index of the argument): the received tensors that a block was given there, by id."""
        self.entries: Counter[int] = Counter()
        """Number of times that the forward has entered each block, by place."""
        self._entered_at = entered_at
        self._autocast: AutocastState | None = None
        self.draws: BackwardDraws | None = None
        """The check of random draws in its backward; None until the forward is over."""

    def enter(self, place: int) -> int:
        """Count an entry of a block. Returns the number of entries before this one."""
        self.entries[place] += 1
        self._entered_at(place)
        return self.entries[place] - 1

    def returned(self, leaves: Sequence[object], numbers: Mapping[int, int], *, is_behind: bool) -> None:
        """Note what a block has returned.

        Args:
            leaves: Leaves of the result.
            numbers: Index of a leaf -> its number in the tracing pass.
            is_behind: True if the block is behind this member's blocks.
        """
        if is_behind:
            self._given |= {id(leaf): (leaf, None) for leaf in leaves}
        for index, number in numbers.items():
            leaf = leaves[index] if index < len(leaves) else None
            if isinstance(leaf, Tensor) and (number in self._coming or number in self._collected):
                self._returned.setdefault(id(leaf), (leaf, []))[1].append(number)

    def give(self, fake: Tensor, numbers: Sequence[int], at: tuple[int, int]) -> Tensor | None:
        """Return the received tensor for a fake, or None if no tensor was received for it.

        A fake that came before gets the same tensor again.

        Args:
            fake: The fake that a block is given.
            numbers: Numbers that the tensor may have, as seen in the tracing pass.
            at: Place of the block, and index of the argument.
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
        """Return the received tensor for a fake that a checkpoint passes, or None if it is not known.

        The fake may be a new object: torch makes copies under saved-tensor hooks, such as those of offloading, and code
        before the block makes its tensors again. Then the block gets what it took there in the forward, if that was
        only one tensor.
        """
        if id(fake) in self._given:
            return self._given[id(fake)][1]
        taken = list(self._at.get(at, {}).values())
        return taken[0] if len(taken) == 1 else None

    def _numbers(self, tensor: Tensor, numbers: Sequence[int], crossing: Mapping[int, object]) -> list[int]:
        """Return the tensor's numbers in `crossing`: those of its return from a block, else the first of `numbers`."""
        _, own = self._returned.get(id(tensor), (None, []))
        return [n for n in own if n in crossing] or [n for n in numbers if n in crossing][:1]

    def entered(self, number: int) -> Tensor | None:
        """Return the received tensor with this number, or None if it was not received. All blocks get the same copy."""
        index = self._coming.get(number)
        leaf = None if index is None else self.received[index]
        if index is None or leaf is None:
            return None
        if number not in self._entered:
            entered: Tensor = ReceivedCopy.apply(leaf, self._gradients, index) if leaf.requires_grad else copy_of(leaf)  # type: ignore[no-untyped-call]  # of torch
            self._entered[number] = entered
        return self._entered[number]

    def collect(self, tensor: Tensor, numbers: Sequence[int], at: tuple[int, int], block: str) -> None:
        """Note that a block behind this member's takes a tensor that has to be sent.

        Raises ConfigError if the tensor is not the one that other members know by its number. The member that makes a
        tensor sees all blocks that take it. A receiving member gets it by number and cannot check this.
        """
        is_behind = self._given.get(id(tensor), (None, tensor))[1] is None
        for each in () if is_behind else self._numbers(tensor, numbers, self._collected):
            # A fake may only pass through this member. Then the received tensor is sent on.
            found = self.give(tensor, [each, *numbers], at) if is_fake(tensor) else tensor
            taken = self._collected[each]
            if taken is None and found is not None:
                taken = self._collected[each] = (found, found._version, block)
            if taken is None or taken[0] is not found:
                raise ConfigError(f"block {block!r} takes another tensor than in the tracing pass: {SAME}")

    @property
    def is_complete(self) -> bool:
        """True once blocks below have taken all tensors that cross the cut below."""
        return bool(self._collected) and None not in self._collected.values()

    @property
    def going(self) -> tuple[Tensor | None, ...]:
        """The tensors that cross the cut below, in the order of sending; None for one that no block has taken.

        Raises ConfigError if a tensor was changed after a block had taken it.
        """
        for tensor, version, block in filter(None, self._collected.values()):
            if tensor._version != version:
                raise ConfigError(f"code changes in place, behind block {block!r}, what that block has taken: {SAME}")
        return tuple(None if each is None else each[0] for each in self._collected.values())

    def backward_is_called(self, device: str = "cpu") -> None:
        """Remember the autocast state in which the user's loop calls `step.backward`."""
        self._autocast = AutocastState(device)

    def ends(self, gradients: Sequence[Tensor | None]) -> Ends:
        """Return where the backward of a member without the loss begins. `gradients`: one for each of `going`."""
        return [
            (tensor, gradient)
            for tensor, gradient in zip(self.going, gradients, strict=True)
            if tensor is not None and gradient is not None and tensor.requires_grad
        ]

    def backward(self, ends: Ends) -> None:
        """Run the whole backward."""
        if ends:
            torch.autograd.backward([tensor for tensor, _ in ends], [gradient for _, gradient in ends])

    def under_autocast(self, compute: Callable[[], Any]) -> Any:
        """Compute under the autocast state in which `step.backward` was called."""
        assert self._autocast is not None, "step.backward was called in this pass before"
        with self._autocast.again():
            return compute()

    def let_go(self) -> None:
        """Forget the tensors of the forward. What is left of the backward holds those that it needs."""
        for each in (self._entered, self._collected, self._returned, self._given, self._at):
            each.clear()

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        """Gradients of the received tensors, in their order. They cross the cut above after the backward."""
        return tuple(self._gradients.get(index) for index in range(len(self.received)))
