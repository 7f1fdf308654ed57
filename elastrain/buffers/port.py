"""Ports of the buffers: arithmetic on numbers, storage of shard states, and the sink of captured states.

A worker implements them with tensors (`runtime/tensors/`), the simulator with symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from elastrain.job.values import Record

# Any and not type variables: the buffers never look inside, and the two drivers use different types.
Tensor: TypeAlias = Any
"""A place with numbers in it: a buffer, or a part of a slot, of the model or of another member's memory."""
GradientSlot: TypeAlias = Any
"""One copy of all gradients, into which the training loop accumulates. After `release()` its content is not needed.

After `free()` it is not used again.
"""
State: TypeAlias = Any
"""A shard's parameters and the optimizer's state for them. `state.shard` is the shard's index."""
Key = TypeVar("Key", bound=Hashable)


class Arithmetic(Protocol):
    """Operations on numbers. Implementations do not know which step or member the numbers belong to."""

    def new_slot(self) -> GradientSlot:
        """Return a new gradient slot."""
        ...

    def add_block(self, slot: GradientSlot, later: GradientSlot, block: int) -> None:
        """Add a later run's part in one block to the slot, in place."""

    def lane(self, slot: GradientSlot, shard: int, lane: int) -> Tensor:
        """Return a shard's part of the slot, without a copy."""

    def new_buffer(self, like: Tensor) -> Tensor:
        """Return a new buffer like this tensor."""
        ...

    def new_kept(self, like: Tensor) -> Tensor | None:
        """Return a new place for a gradient that a backup keeps, or None if a buffer may be used.

        On a device it is shared host memory: the gradient may be sent again, and rarely is.
        """

    # For example size and dtype. Few kinds, so that a returned buffer is soon used again.
    def kind(self, tensor: Tensor) -> Hashable:
        """Return a key. Buffers with equal keys can replace one another."""

    def add(self, shard: int, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Compute `left + right`, in this order. `out` may be one of them."""
        # The operation depends on the shard: running statistics are composed, not added.

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Copy the numbers of `source` to `out`."""
        ...

    def is_far(self, tensor: Tensor) -> bool:
        """Return True if the numbers have to be copied to a buffer before anything is computed with them."""
        ...

    def square_norm(self, shard: int, total: Tensor) -> float:
        """Return the squared norm of a shard's gradient."""
        ...

    def checksum(self, tensor: Tensor) -> int:
        """Return a cheap checksum of the tensor's bits. The sender computes it, and every reader computes it again."""

    def pack_checksums(self, checksums: Sequence[int]) -> Tensor:
        """Return the checksums as a tensor, to be sent before the tensors that they belong to."""

    def unpack_checksums(self, packed: Tensor) -> list[int]:
        """Return the checksums that `pack_checksums` has packed."""
        ...

    def create(self, shard: int, *, bound: bool) -> State:
        """Return the initial state: as it was read, else from the parameters.

        If `bound`, it uses the model's memory.
        """

    def update(self, items: Sequence[tuple[State, Tensor, tuple[int, ...]]], record: Record) -> None:
        """Apply a step to states, in place. Items: (state, gradient, bit masks of the leaves that got a gradient)."""
        # Several at once, because one call of the optimizer costs more than the arithmetic of a small shard.

    def bind(self, state: State, *, is_new: bool = False) -> None:
        """Copy the state's parameters into the model. They share memory afterwards where possible.

        If `is_new`, this member was not the shard's primary before.
        """

    def show(self, state: State) -> None:
        """Copy the state's parameters into the model. They do not share memory."""

    def unbind(self, state: State) -> bool:
        """Give the state memory of its own. Returns False if it has that already."""

    def digest(self, state: State) -> int:
        """Return the digest of a state."""
        ...

    def has_master(self, shard: int) -> bool:
        """Return True if the shard's state has more precision than the model's parameters."""

    def digest_published(self, shard: int, state: State | None) -> int:
        """Return the digest of a shard's parameters as published from `state`; None: as the model has them."""
        # From the state and not from the model, so that a bit that flipped between update and publish is found.

    def parameters(self, shard: int, part: tuple[int, int] | None = None) -> Tensor:
        """Return the shard's parameters in the model, without a copy. `part`: piece `part[0]` of `part[1]` only."""

    def take_parameters(self, shard: int, published: Tensor, part: tuple[int, int] | None = None) -> None:
        """Copy these published parameters into the model. `part`: this piece, which the script does not see yet."""

    def hold(self, blocks: Collection[int] | None, unused: list[Tensor] | None = None) -> None:
        """Keep the parameters that these blocks read in the model's memory, and no others. None: the present blocks.

        unused: buffers to free first, together with scratch, since fewer states are needed. If `blocks` is given too,
            the loop
        has ended and free gradient slots are freed as well. None: gradients are still computed, and nothing is freed.
        """
        # A shard of several blocks stays as long as any of them does: a tied weight is one tensor.

    def parameters_bytes(self, shard: int) -> int:
        """Return the bytes of the shard's parameters."""
        ...

    def pack(self, state: State, digest: int | None = None, part: tuple[int, int] | None = None) -> list[Tensor]:
        """Return the state as tensors to be sent, with the digest, which is computed if it is not given.

        part: piece `part[0]` of `part[1]` only. The first piece has the digest.
        """
        ...

    def taken_piece(self, piece: Sequence[Tensor]) -> list[Tensor]:
        """Return a copy of a piece of a packed state, because its sender may change the state before the last piece."""
        ...

    def unpack(self, *pieces: Sequence[Tensor], in_place: bool = False) -> tuple[State, int]:
        """Return a state with memory of its own, and the digest of what was packed.

        Args:
            pieces: All pieces, in order.
            in_place: Leave the state in the sender's memory, if it can be read there. It is not to be kept.
        """


class StateStore(Protocol[Key]):
    """A mapping of states. A state that was taken out and changed has to be put back."""

    # A state may lie on disk: a change of what was read from there is lost otherwise.

    @property
    def outside(self) -> Container[int]:
        """Shards whose states are read from disk before use, and written back after changes."""

    # Pointers do not tell: the masters of a primary share no memory with a model of half precision.
    @property
    def bound(self) -> set[int]:
        """Shards whose primary is this member. In a job on a device, all others lie outside, in host memory."""

    def __getitem__(self, key: Key) -> State: ...

    def __setitem__(self, key: Key, state: State) -> None: ...

    def __contains__(self, key: object) -> bool: ...

    def __iter__(self) -> Iterator[Key]: ...

    def __delitem__(self, key: Key) -> None: ...

    def take_out(self, key: Key) -> State:
        """Remove a state, and return it in host memory."""
        ...

    def copy(self, key: Key) -> State:
        """Return a copy of the state that shares no memory with any other state."""

    def copy_to_host(self, key: Key) -> State:
        """Return a copy of the state in host memory, for a checkpoint."""

    # Without a copy: an optimizer's state is twice the size of its parameters.
    def adopt(self, key: Key, other: Any, theirs: Any) -> None:
        """Move a state here from another store."""

    def size_bytes(self, key: Key) -> int:
        """Return the bytes of a state."""
        ...


class FetchSink(Protocol):
    """A receiver of the states that the training loop has asked for."""

    def gather(self, state: State, is_intact: Callable[[], bool]) -> bool:
        """Copy a state, and then ask whether it is intact: if not, the copy does not count. Returns the answer."""


class CaptureSink(Protocol):
    """A receiver of captured states for a checkpoint. It writes them in the background."""

    def is_ready_for(self, size_bytes: int) -> bool:
        """Return True if it takes a state of this size now: there is room for a copy, or will never be.

        If there never will be room, the state has to be lent, and waiting gains nothing. A step that changes the state
        may never come.
        """

    def make_room(self, size_bytes: int, *, is_awaited: bool) -> bool:
        """Wait until there is room for a copy.

        Returns False if there never will be. `is_awaited`: a step waits for it.
        """

    def take(self, step: int, digest: int | None, state: State) -> None:
        """Take the state, as of `step`. It belongs to the sink, and shares no memory with anything that changes.

        digest: as `Arithmetic.digest` computes it; None if it is not known yet.
        """

    def lend(self, step: int, digest: int | None, state: State) -> None:
        """Wait until the state, as of `step`, is written. It changes next, and there is no room for a copy."""


class NoSink:
    """A sink for jobs that write no checkpoint."""

    def is_ready_for(self, size_bytes: int) -> bool:
        """Return True."""
        return True

    def make_room(self, size_bytes: int, *, is_awaited: bool) -> bool:
        """Return True."""
        return True

    def take(self, step: int, digest: int | None, state: State) -> None:
        """Ignore the state."""

    def lend(self, step: int, digest: int | None, state: State) -> None:
        """Ignore the state."""
