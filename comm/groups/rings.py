"""The slot rings of a group in one generation: mine, and the others' as far as they are known here."""

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
        """The error of waiting for a member from which nothing more comes, though its end breaks nothing off."""

    def is_linked(self, member: str) -> bool:
        """Whether more may come from it: it is in the view, and not lost."""

    def is_ahead(self, member: str) -> bool:
        """Whether it was heard of in a newer generation."""

    def place(self, tensor: torch.Tensor) -> Location | None:
        """Its location in shared memory of which the others know, or will know before they read it."""

    def segment(self, member: str, number: int) -> torch.Tensor | None:
        """All bytes of a member's segment; None while it has not come here."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See SharedMemory.empty."""

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See SharedMemory.scratch."""

    def fail(self, ended: Callable[[], CommError | None], error: MemberLost | Aborted | Timeout) -> CommError:
        """Fail everything, unless the caller's generation `ended` already; returns the error that it ended with."""

    def show_rings(self, group: int, members: tuple[str, ...], rings: torch.Tensor) -> None:
        """Give these members my rings of this group."""


class Rings:
    """`step`: the sequence number of the step that comes next, counted alike by all members.

    `find` gives a member's rings, or None while they have not come here. `others`: ranks, in the order in which they
    are waited for.
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
        """Whether the rings of all others have come here."""
        for rank in self.others:
            buffer = self.find(self.members[rank])
            if buffer is None:
                return False
            self.buffers[rank] = buffer
        return True

    def settle(self) -> None:
        """All others are in this generation, or have been: each has a ring of it."""
        for rank, buffer in self.buffers.items():
            if rank not in self.by_rank:
                self.by_rank[rank] = buffer.of_or_any(self.generation)
        self.opened = True

    def absent(self) -> list[str]:
        """Members that have not come so far."""
        is_here = self.has_shown if self.opened else self.has_begun
        return [self.members[rank] for rank in sorted(self.others) if not is_here(rank)]

    def has_begun(self, rank: int) -> bool:
        """Whether this member is known to have begun the generation."""
        buffer = self.find(self.members[rank])
        return buffer is not None and buffer.find(self.generation) is not None

    def has_shown(self, rank: int) -> bool:
        """Whether this member has published the step that comes next."""
        return bool(self.by_rank[rank].has_published(self.generation, self.step + 1))

    def wait_first_for(self, rank: int) -> None:
        """This one came last: the next time it is waited for first, and the others are there when it comes."""
        self.others.remove(rank)
        self.others.insert(0, rank)

    def those_here(self) -> list[str]:
        """Members that have published anything in this generation."""
        return [self.members[rank] for rank, ring in self.by_rank.items() if ring.published(self.generation)]
