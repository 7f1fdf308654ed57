"""A group on one host in one generation: operations by slot rings and waits, in the thread that calls.

All members count the same steps: one for each round of each operation, whether they have anything to say in it or not.
A member may be `SLOTS` steps ahead of what others have finished, so nothing in a ring is written over while it is read.
Nothing here knows of sockets; what is needed of the communicator is `SharedHost`.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import partial

import torch

from elastrain.comm.collectives.algorithms import Round
from elastrain.comm.collectives.reducing import NOTHING, STAGE_BYTES, Operation, Participant
from elastrain.comm.errors import Aborted, CommError, ProtocolError
from elastrain.comm.groups.members import MemberList
from elastrain.comm.groups.rings import Rings, SharedHost
from elastrain.comm.groups.slot_ring import (
    DESCRIPTION_MAX_BYTES,
    INLINE_BYTES,
    SLOTS,
    DoubleBuffer,
    Entry,
    Location,
    SlotRing,
    reached,
)
from elastrain.comm.groups.waits import RingWaits
from elastrain.comm.groups.works import OperationRequest
from elastrain.comm.shm.shared_memory import futex_wake_all

_INLINE = Location(segment=0, offset_bytes=0)
_NEVER = 1 << 30  # steps ahead: far from both ends of what `reached` can tell


@dataclass(kw_only=True, eq=False)
class GroupState:
    """The state that a group keeps from one generation to the next. `lock` guards what begins and ends."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    buffer: DoubleBuffer | None = None  # my rings; none before the first operation
    ring: SlotRing | None = None  # of the newest generation begun
    readers: dict[str, DoubleBuffer] = field(default_factory=dict)  # members that may read what was published last
    view: frozenset[str] | None = None  # members of the newest view, which readers are of; None before the first
    shown: set[str] = field(default_factory=set)  # members that were given my rings
    met: set[str] = field(default_factory=set)  # members that have them, for they have taken part
    stage: torch.Tensor | None = None
    kept: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # not used again before a step is finished


class PartMemory:
    """Memory for the parts that are offered at the next step: in the ring if small, else in shared memory."""

    def __init__(self, host: SharedHost, state: GroupState, rings: Rings) -> None:
        self._host, self._state, self._rings = host, state, rings
        self.placed: tuple[torch.Tensor, Location] | None = None  # the last tensor: one is often offered twice

    def owns(self, tensor: torch.Tensor) -> bool:
        """See reducing.Memory."""
        return self._host.place(tensor) is not None

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See reducing.Memory."""
        rings = self._rings
        if numel * dtype.itemsize <= INLINE_BYTES:
            return rings.mine.inline_area(rings.step)[: numel * dtype.itemsize].view(dtype)
        finished = [ring.finished(rings.generation) for ring in rings.by_rank.values()]
        kept = self._state.kept
        kept[:] = [(step, old) for step, old in kept if not all(reached(count, step + 1) for count in finished)]
        tensor = self._host.scratch(numel, dtype)
        kept.append((rings.step, tensor))
        return tensor

    def stage(self) -> torch.Tensor:
        """See reducing.Participant."""
        if self._state.stage is None:
            self._state.stage = self._host.empty(STAGE_BYTES, torch.uint8)
        return self._state.stage

    def locate(self, offered: torch.Tensor) -> Location:
        """Return the location at which peers find this tensor."""
        if self.placed is not None and self.placed[0] is offered:
            return self.placed[1]
        within = offered.data_ptr() - self._rings.mine.inline_area(self._rings.step).data_ptr()
        if 0 <= within < INLINE_BYTES:
            return Location(segment=0, offset_bytes=within)
        location = self._host.place(offered)
        if location is None:
            raise CommError("a tensor was offered that does not lie in shared memory")  # a bug of an operation
        self.placed = (offered, location)
        return location


class _Phase(enum.Enum):
    NEW = "new"
    MEETING = "meeting"  # the first operation is a barrier, which is itself the wait for all others
    OPEN = "open"  # all others are in this generation, or have been


class GroupGeneration:
    """A group in one generation, used by one thread at a time. `rings.members` are its members at the beginning."""

    def __init__(
        self, host: SharedHost, state: GroupState, group: MemberList, generation: int, waiting: set[RingWaits]
    ) -> None:
        self.rings = Rings(group.me, group.members, generation)
        self._name, self._host, self._state = group.name, host, state
        self._waits = RingWaits(host, self.rings, waiting)
        self._memory = PartMemory(host, state, self.rings)
        self._phase = _Phase.NEW

    @property
    def error(self) -> CommError | None:
        """The error that has ended all waits here; None without an error."""
        return self._waits.error

    def end(self, error: CommError) -> None:
        """End all waits with this error, unless they have ended. Called by the communicator's thread."""
        if self._waits.error is None:
            self._waits.error = error

    @property
    def participant(self) -> Participant:
        """The member as its operations see it."""
        members, memory = self.rings.members, self._memory
        return Participant(rank=self.rings.rank, world=len(members), memory=memory, stage=memory.stage)

    def open(self, ring: SlotRing, find: Callable[[str], DoubleBuffer | None], request: OperationRequest) -> None:
        """Wait until all others are in this generation, before anything else. Raises as `run`.

        Afterwards no member reads what was published in former ones. If the request is a barrier and all rings are
        known, there is no wait here: the barrier itself proves the same. If it fails, no member has completed it.
        """
        rings = self.rings
        rings.mine, rings.find = ring, find
        self._waits.description = f"the beginning of {self._name!r}"
        # Non-members may still read what I have published last: a barrier does not tell that they are done.
        only_members = self._state.readers.keys() <= set(rings.members)
        if request.barrier and only_members and rings.know_all():
            self._phase = _Phase.MEETING
            return
        for rank in rings.others:
            member = rings.members[rank]
            buffer = rings.buffers[rank] = self._waits.wait(partial(find, member), member)
            rings.by_rank[rank] = self._waits.wait(partial(buffer.find, rings.generation), member)
        self._await_leavers()
        self._settle()

    def _settle(self) -> None:
        """Note that all others are in this generation, or have been."""
        state, rings = self._state, self.rings
        assert state.buffer is not None
        state.buffer.free_former()
        state.kept.clear()
        readers = {rings.members[rank]: buffer for rank, buffer in rings.buffers.items()}
        with state.lock:  # a newer view may have come meanwhile: a member that is not in it is never waited for
            state.readers = {m: buffer for m, buffer in readers.items() if state.view is None or m in state.view}
        rings.settle()
        self._phase = _Phase.OPEN

    def _await_leavers(self) -> None:
        """Wait until members that left this group no longer read what was published last."""
        former = self._state.buffer.former if self._state.buffer else None
        if former is None:
            return
        generation, count = former.generation, former.published(former.generation)
        for member, buffer in list(self._state.readers.items()):
            if member not in self.rings.members:
                self._waits.wait(partial(self._has_left, member, buffer, generation, count), member)

    def _has_left(self, member: str, buffer: DoubleBuffer, generation: int, count: int) -> bool | None:
        """Return True once this member reads none of the `count` steps published in the generation, else None."""
        ring = buffer.find(generation)
        finished = 0 if ring is None else ring.finished(generation)
        gone = buffer.newest > generation or reached(finished, count) or self._host.why_gone(member) is not None
        return gone or None

    def begin(self, request: OperationRequest) -> bool:
        """Begin to execute a request: wait until the slot of its first step is free. Raises as `run`.

        Returns False where the generation has to be opened first; all slots are free then.
        """
        self._waits.start(request, "a slot of the ring")
        if self._phase is not _Phase.OPEN:
            return False
        self._await_slot()
        return True

    def run(self, operation: Operation) -> None:
        """Execute the operation. Raises MemberLost, Aborted, Timeout or ProtocolError; the generation is unusable then.

        Peers learn of a failure before the caller does, because the caller may change its tensors then.
        """
        try:
            self._run(operation)
        except BaseException:
            self.rings.mine.fail()
            raise
        finally:
            self._memory.placed = None  # it may be the caller's

    def _run(self, operation: Operation) -> None:
        rings = self.rings
        self._waits.description = operation.description
        description = operation.description.encode()[:DESCRIPTION_MAX_BYTES]
        lenders: set[int] = set()
        read: set[int] = set()
        for number, plan in enumerate(operation.rounds):
            last = number == len(operation.rounds) - 1
            if number and not plan.again and self._phase is not _Phase.MEETING:
                self._await_slot()
            offered = operation.offer(number) if plan.sends or plan.again else NOTHING
            if lenders and not last:
                self._check_lent(lenders)
            self._publish(description, offered, plan, lent=operation.lends and not number)
            self._await_parts(plan)
            for rank in () if plan.again else plan.awaits:
                entry = self._take(operation, number, rank, description)
                if entry.lent:
                    lenders.add(rank)
                if entry.size_bytes or last:
                    read.add(rank)
            operation.finish(number)
            if self._phase is _Phase.MEETING and plan.awaits:
                self._settle()  # rank 0 has seen all, the others have its word that it has
            if last:
                self._finish(read)
            rings.step += 1
        if len(self._state.met) < len(rings.others):
            self._state.met.update(rings.those_here())

    def _publish(self, description: bytes, offered: torch.Tensor, plan: Round, *, lent: bool) -> None:
        rings = self.rings
        if not plan.again:
            given = offered if offered is not NOTHING and offered.numel() else None
            location = _INLINE if given is None else self._memory.locate(given)
            rings.mine.write(
                rings.step, description=description, offered=given, location=location, sends=plan.sends, lent=lent
            )
        rings.mine.count_published(rings.step)
        if plan.sends or (plan.again and plan.awaits):  # else no thread awaits it: a sleeping one awaits a later
            futex_wake_all(rings.mine.published_address)

    def _finish(self, read: Set[int]) -> None:
        """Tell the others that this member needs nothing more from them for this operation.

        Raises instead if one of them left the generation: its memory may have been overwritten while it was read.
        """
        for rank in read:
            if self.rings.by_rank[rank].generation != self.rings.generation:
                raise self.error or Aborted(f"{self.rings.members[rank]!r} went on to a newer view")
        # Once an operation: in none more than SLOTS rounds show anything, so none waits for its own steps.
        self.rings.mine.count_finished(self.rings.step)
        futex_wake_all(self.rings.mine.finished_address)

    def _take(self, operation: Operation, number: int, rank: int, description: bytes) -> Entry:
        rings = self.rings
        entry = rings.by_rank[rank].read(rings.step, rings.rank)
        if entry.description != description:
            theirs, member = entry.description.decode(errors="replace"), rings.members[rank]
            raise Aborted(f"{self._name!r}: {operation.description} at {rings.me!r}, {theirs} at {member!r}")
        try:
            operation.take(number, rank, self._pull(rank, entry) if entry.size_bytes else NOTHING)
        except ValueError as error:
            raise Aborted(f"{operation.description} of {self._name!r} at {rings.me!r}: {error}") from error
        return entry

    def _pull(self, rank: int, entry: Entry) -> torch.Tensor:
        member = self.rings.members[rank]
        if entry.location.segment:
            look = partial(self._host.segment, member, entry.location.segment)
            memory = self._waits.wait(look, member, by_link=True)
        else:
            memory = self.rings.by_rank[rank].inline_area(self.rings.step)
        start, stop = entry.location.offset_bytes, entry.location.offset_bytes + entry.size_bytes
        if stop > memory.numel():
            raise ProtocolError(f"{member!r} offers bytes {start} to {stop} of {memory.numel()}")
        return memory[start:stop].view(entry.dtype)

    def _check_lent(self, lenders: Set[int]) -> None:
        """Throw the operation away where a lender has failed since: its tensor may have changed while it was read.

        The member's word why, its death, or the next view is waited for, so that all members end with the same error.
        """
        for rank in lenders:
            ring = self.rings.by_rank[rank]
            if ring.has_failed(self.rings.generation):
                self._await(rank, ring.published_address, ring.has_published, self.rings.step + _NEVER)

    def _await_slot(self) -> None:
        wanted = self.rings.step - SLOTS + 1
        for rank in self.rings.others if wanted > 0 else ():
            ring = self.rings.by_rank[rank]
            if not ring.has_finished(self.rings.generation, wanted):
                self._await(rank, ring.finished_address, ring.has_finished, wanted)

    def _await_parts(self, plan: Round) -> None:
        last: int | None = None
        for rank in self.rings.others:
            if rank in plan.awaits and self._await_part(rank):
                last = rank
        if last is not None:
            self.rings.wait_first_for(last)

    def _await_part(self, rank: int) -> bool:
        """Wait for the next step of this rank. Returns False if it was there at once."""
        rings = self.rings
        ring = rings.by_rank.get(rank)
        if ring is None:
            begun = partial(rings.buffers[rank].find, rings.generation)
            ring = rings.by_rank[rank] = begun() or self._waits.wait(begun, rings.members[rank])
        if ring.has_published(rings.generation, rings.step + 1):
            return False
        self._await(rank, ring.published_address, ring.has_published, rings.step + 1)
        return True

    def _await(self, rank: int, address: int, has: Callable[[int, int], bool | None], wanted: int) -> None:
        self._waits.wait(partial(has, self.rings.generation, wanted), self.rings.members[rank], address)
