"""Defines the port of the member's ledger: what is done to numbers, and where the states of shards lie.

A worker implements it with tensors (`runtime/tensors/`), the simulator with symbols.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from elastrain.job.values import Record

# Any, not type variables: the ledger hands them on and never looks inside, and two drivers put different things there.
Tensor: TypeAlias = Any
"""A place with numbers in it: a buffer, or a part of a slot, of the model or of another member's memory."""
GradientSlot: TypeAlias = Any
"""One copy of all gradients, into which the training loop accumulates. After `release()` nobody needs what is in it."""
State: TypeAlias = Any
"""A shard's parameters and what the optimizer keeps beside them; `state.shard` says which shard's."""
Key = TypeVar("Key", bound=Hashable)


class Arithmetic(Protocol):
    """What is done to numbers. Nothing here remembers which step or member they belong to."""

    def new_slot(self) -> GradientSlot: ...

    def add_block(self, slot: GradientSlot, later: GradientSlot, block: int) -> None:
        """Add a later run's part in one block to the slot, in place."""

    def lane(self, slot: GradientSlot, shard: int, lane: int) -> Tensor:
        """A shard's part of the slot, as it lies there."""

    def new_buffer(self, like: Tensor) -> Tensor: ...

    # Size and dtype, say: few kinds, so that a buffer that comes back is soon used again.
    def kind(self, tensor: Tensor) -> Hashable:
        """Buffers of one kind may stand for one another."""

    def add(self, shard: int, left: Tensor, right: Tensor, out: Tensor) -> None:
        """`left + right`, in this order; `out` may be one of them."""
        # The shard says how: running statistics are composed, which is no plain sum.

    def copy(self, source: Tensor, out: Tensor) -> None: ...

    def square_norm(self, shard: int, total: Tensor) -> float: ...

    def checksum(self, tensor: Tensor) -> int:
        """Of its bits: cheap enough to be made of all that is sent, and made again of all that is read."""

    def pack_checksums(self, checksums: Sequence[int]) -> Tensor:
        """As they travel: before the tensors that they are of."""

    def unpack_checksums(self, packed: Tensor) -> list[int]: ...

    def create(self, shard: int, *, bound: bool) -> State:
        """The initial state, as it was read, else from the parameters; bound, it works on the model's own memory."""

    def update(self, items: Sequence[tuple[State, Tensor, tuple[int, ...]]], record: Record) -> None:
        """Bring states to after the step, in place: (state, gradient, bit masks of the leaves that got one)."""
        # Several at once: one call of the optimizer is dearer than the arithmetic of a small shard.

    def bind(self, state: State) -> None:
        """The model gets the state's parameters, and they share memory from then on where they can."""

    def unbind(self, state: State) -> bool:
        """Give the state memory of its own; False if it has that already."""

    def digest(self, state: State) -> int: ...

    def has_master(self, shard: int) -> bool:
        """Whether a shard's state is more precise than what the model computes with."""

    def digest_published(self, shard: int, state: State | None) -> int:
        """Of a shard's parameters as its primary publishes them; with no state, of what the model computes with."""
        # From the state and not from the model: a bit that flipped between update and publish shows only that way.

    def parameters(self, shard: int) -> Tensor:
        """What the model computes with, as it lies there."""

    def take_parameters(self, shard: int, published: Tensor) -> None:
        """From now on the model computes with these."""

    def hold(self, blocks: Collection[int] | None, unused: list[Tensor] | None = None) -> None:
        """Have the parameters that these blocks read in the model's memory, and no others. None: those that are here.

        unused: scratch and these buffers go before, as there are fewer states here or, with blocks, no gradient is
        computed any more: then free slots go, too. None: that goes on.
        """
        # A shard of several blocks stays as long as any of them does: a tied weight is one tensor.

    def parameters_bytes(self, shard: int) -> int: ...

    def pack(self, state: State) -> list[Tensor]: ...

    def unpack(self, payload: Sequence[Tensor]) -> tuple[State, int]:
        """A state with memory of its own, and the digest of what was packed."""


class StateStore(Protocol[Key]):
    """States by key. What was taken out and changed has to be put back."""

    # Put back, because a state may lie on disk: a change of what was read from there is lost otherwise.

    @property
    def outside(self) -> frozenset[int]:
        """Shards whose states are read before they are used, and written after they were changed."""

    def __getitem__(self, key: Key) -> State: ...

    def __setitem__(self, key: Key, state: State) -> None: ...

    def __contains__(self, key: object) -> bool: ...

    def __iter__(self) -> Iterator[Key]: ...

    def __delitem__(self, key: Key) -> None: ...

    def pop(self, key: Key, /) -> State: ...

    def copy(self, key: Key) -> State:
        """A state that shares no memory with anything here."""

    # Without a copy: an optimizer's state is twice the size of its parameters.
    def adopt(self, key: Key, other: Any, theirs: Any) -> None:
        """Move a state over from another shelf."""

    def size_bytes(self, key: Key) -> int: ...


class CaptureSink(Protocol):
    """Takes the captured states of a checkpoint, to write them when there is time."""

    def is_ready_for(self, size_bytes: int) -> bool:
        """Whether it takes a state of this size before others are written: there is room for a copy, or never will be.

        Where there never will be, it has to be lent, and nothing is gained by waiting for the change that asks for it:
        where no step follows, none ever asks.
        """

    def make_room(self, size_bytes: int, *, is_awaited: bool) -> bool:
        """Wait until it does. False where it never will. `is_awaited`: a step waits until the next state is taken."""

    def take(self, step: int, digest: int | None, state: State) -> None:
        """The state, as of `step`, is the sink's own from now on: it shares no memory with anything that changes.

        digest: as `Arithmetic.digest` has it; None where nobody knows it yet.
        """

    def lend(self, step: int, digest: int | None, state: State) -> None:
        """The state, as of `step`, is to change next: wait until it is written, since there is no room for a copy."""


class NoSink:
    """Where no checkpoint is ever written."""

    def is_ready_for(self, size_bytes: int) -> bool:
        return True

    def make_room(self, size_bytes: int, *, is_awaited: bool) -> bool:
        return True

    def take(self, step: int, digest: int | None, state: State) -> None: ...

    def lend(self, step: int, digest: int | None, state: State) -> None: ...
