"""The slot rings of a group in one generation: this member's own, and those of the others known here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from elastrain.comm.errors import Aborted, CommError, MemberLost, Timeout
from elastrain.comm.groups.slot_ring import DoubleBuffer, Location, SlotRing
from elastrain.comm.shm.shared_memory import Alarm


class SharedHost(Protocol):
    """The port through which operations in shared memory reach their communicator, from any thread."""

    alarm: Alarm

    def why_gone(self, member: str) -> MemberLost | None:
        """Return the error for waiting for a member that left or was not reached, else None."""

    def is_linked(self, member: str) -> bool:
        """Return True if the member is in the view and not lost, so that more may come from it."""

    def is_ahead(self, member: str) -> bool:
        """Return True if the member is known to be in a newer generation."""

    def place(self, tensor: torch.Tensor) -> Location | None:
        """Return the tensor's location in shared memory, announced to peers; None if it lies elsewhere."""

    def segment(self, member: str, number: int) -> torch.Tensor | None:
        """Return all bytes of a member's segment; None if it has not arrived."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See SharedMemory.empty."""

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See SharedMemory.scratch."""

    def fail(self, ended: Callable[[], CommError | None], error: MemberLost | Aborted | Timeout) -> CommError:
        """Fail everything, unless the generation has `ended` already; returns the error with which it ended."""

    def show_rings(self, group: int, members: tuple[str, ...], rings: torch.Tensor) -> None:
        """Send this member's rings of this group to these members."""


class Rings:
    """The rings of all members. `step`: the sequence number of the next step, the same on all members.

    `find` returns a member's rings, or None if they have not arrived. `others`: ranks, in the order of the waits.
    """

    def __init__(self, me: str, members: Sequence[str], generation: int) -> None:
        self.me, self.members, self.generation = me, tuple(members), generation
        self.rank = self.members.index(me)
        self.step = 0
        self.opened = False  # all others are in this generation, or have been
        # Where members begin one after the other, the last one comes last: one sleep for it, and the others are there.
        self.others = [*reversed(range(self.rank)), *reversed(range(self.rank + 1, len(self.members)))]
        self.mine: SlotRing  # from the opening on
        self.find: Callable[[str], DoubleBuffer | None] = lambda _member: None
        self.buffers: dict[int, DoubleBuffer] = {}
        self.by_rank: dict[int, SlotRing] = {}

    def know_all(self) -> bool:
        """Return True if the rings of all others have arrived."""
        for rank in self.others:
            buffer = self.find(self.members[rank])
            if buffer is None:
                return False
            self.buffers[rank] = buffer
        return True

    def settle(self) -> None:
        """Note that all others have a ring of this generation."""
        for rank, buffer in self.buffers.items():
            if rank not in self.by_rank:
                self.by_rank[rank] = buffer.of_or_any(self.generation)
        self.opened = True

    def absent(self) -> list[str]:
        """Return the members that have not arrived yet."""
        is_here = self.has_shown if self.opened else self.has_begun
        return [self.members[rank] for rank in sorted(self.others) if not is_here(rank)]

    def has_begun(self, rank: int) -> bool:
        """Return True if this member has begun the generation."""
        buffer = self.find(self.members[rank])
        return buffer is not None and buffer.find(self.generation) is not None

    def has_shown(self, rank: int) -> bool:
        """Return True if this member has published the next step."""
        return bool(self.by_rank[rank].has_published(self.generation, self.step + 1))

    def wait_first_for(self, rank: int) -> None:
        """Wait for this rank first from now on: it came last, so the others are there when it comes."""
        self.others.remove(rank)
        self.others.insert(0, rank)

    def those_here(self) -> list[str]:
        """Return the members that have published a step in this generation."""
        return [self.members[rank] for rank, ring in self.by_rank.items() if ring.published(self.generation)]
