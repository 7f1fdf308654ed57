"""Executor of operations of groups on one host: in order per group, in the caller's thread or in a thread pool.

Failures are decided elsewhere (`SharedHost.fail`).
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from elastrain.comm.collectives.reducing import Operation
from elastrain.comm.errors import Aborted, CommError, MemberLost, ProtocolError, Timeout
from elastrain.comm.groups.group_generation import GroupGeneration, GroupState
from elastrain.comm.groups.members import MemberList
from elastrain.comm.groups.rings import SharedHost
from elastrain.comm.groups.slot_ring import DOUBLE_BUFFER_BYTES, MEMBERS_MAX, DoubleBuffer
from elastrain.comm.groups.waits import RingWaits
from elastrain.comm.groups.works import OperationRequest, ThreadPool
from elastrain.comm.shm.shared_memory import futex_wake_all


@dataclass(kw_only=True, eq=False)
class _Track:
    """The operations of one group: one that is under way, and those that wait."""

    group: MemberList
    state: GroupState = field(default_factory=GroupState)
    newest: GroupGeneration | None = None  # None: its parts travel as messages
    queue: collections.deque[tuple[GroupGeneration, OperationRequest]] = field(default_factory=collections.deque)
    busy: bool = False  # a thread works off the queue
    running: GroupGeneration | None = None  # in which an operation is under way
    untold: GroupGeneration | None = None  # as `running`, until its caller has been told, too
    told: threading.Event | None = None  # set if a thread waits for that

    def note_told(self) -> None:
        """Note that the callers of all ended operations know. Call this with the state's lock."""
        self.untold = None
        if self.told is not None:
            self.told.set()
            self.told = None


class SharedMemoryExecutor:
    """`renew`, `end` and `hear_rings` are called by the communicator's thread, the others by any."""

    def __init__(self, host: SharedHost, me: str) -> None:
        self._host, self._me = host, me
        self._generation = 0
        self._tracks: dict[int, _Track] = {}
        self._rings: dict[int, dict[str, DoubleBuffer]] = {}  # by group and member
        self._waiting: set[RingWaits] = set()
        self._crew = ThreadPool("elastrain-collectives")

    def add(self, group: MemberList, *, in_memory: bool) -> None:
        """`in_memory`: all its members read each other's memory."""
        track = self._tracks[group.number] = _Track(group=group)
        with track.state.lock:
            self._renew(track, in_memory=in_memory)

    def renew(self, generation: int, members: Sequence[str], in_memory: Callable[[Sequence[str]], bool]) -> object:
        """Begin a generation. What was under way has been ended. `in_memory`: see Placement.

        Returns what is not needed any more, memory of the removed with it: to let go of it takes long.
        """
        gone: list[object] = [self._rings]
        kept = [(n, {m: b for m, b in buffers.items() if m in members}) for n, buffers in list(self._rings.items())]
        self._rings = dict(kept)
        former, self._generation = self._generation, generation
        for number, track in list(self._tracks.items()):
            with track.state.lock:
                gone += (track.newest, track.state.readers)
                self._keep_those_in_view(track.state, number, frozenset(members), former)
                self._renew(track, in_memory=in_memory(track.group.members))
        return gone

    def _keep_those_in_view(self, state: GroupState, number: int, view: frozenset[str], former: int) -> None:
        # A member that has taken part has my rings; on their way to others they may have been discarded.
        fresh = state.shown - state.met
        state.met |= {member for member in fresh if self._took_part(number, member, former)}
        state.met &= view
        state.view = view
        state.readers = {member: buffer for member, buffer in state.readers.items() if member in view}
        state.shown = set(state.met)

    def _took_part(self, number: int, member: str, generation: int) -> bool:
        buffer = self._rings.get(number, {}).get(member)
        ring = None if buffer is None else buffer.find(generation)
        return ring is not None and ring.published(generation) > 0

    def _renew(self, track: _Track, *, in_memory: bool) -> None:
        group = track.group
        track.newest = None
        if in_memory and len(group.members) <= MEMBERS_MAX and self._me in group.members:
            track.newest = GroupGeneration(self._host, track.state, group, self._generation, self._waiting)
        self._begin(track)

    def _begin(self, track: _Track) -> None:
        """Name the newest generation in my rings, for the others: I read nothing of former ones any more.

        While an operation of a former one is under way that is not so; it is done when that ends.
        """
        buffer, former = track.state.buffer, track.running is not None and track.running is not track.newest
        if buffer is not None and not former and buffer.newest < self._generation:
            track.state.ring = buffer.begin(self._generation)
            futex_wake_all(buffer.begun_address)

    def end(self, error: CommError) -> None:
        """End whatever waits, or comes later in this generation, with this error."""
        for track in list(self._tracks.values()):
            with track.state.lock:
                if track.newest is not None:
                    track.newest.end(error)

    @property
    def anybody_waits(self) -> bool:
        """True if a thread waits, so that a change must ring the alarm."""
        return bool(self._waiting)

    def hear_rings(self, group: int, member: str, tensor: torch.Tensor) -> None:
        """Take a member's rings. Raises ProtocolError."""
        if tensor.dtype != torch.uint8 or tensor.numel() != DOUBLE_BUFFER_BYTES:
            raise ProtocolError(f"rings of {tensor.numel()} {tensor.dtype}, {DOUBLE_BUFFER_BYTES} bytes were expected")
        self._rings.setdefault(group, {})[member] = DoubleBuffer(tensor)

    def submit(self, group: MemberList, request: OperationRequest, *, inline: bool) -> bool:
        """Execute it after what was submitted before; with `inline` in this thread, if nothing was.

        Returns False where the parts of this group travel as messages.
        """
        track = self._tracks[group.number]
        with track.state.lock:
            if track.newest is None:
                return False
            track.queue.append((track.newest, request))
            if track.busy:
                return True
            track.busy = True
        if inline:
            self._work_off(track, only=request)
        else:
            self._crew.do(lambda: self._work_off(track))
        return True

    def _work_off(self, track: _Track, only: OperationRequest | None = None) -> None:
        while True:
            with track.state.lock:
                track.note_told()
                if not track.queue:
                    track.busy = False
                    return
                generation, request = track.queue.popleft()
                track.running = track.untold = generation
            error = self._without_graph(track, generation, request)
            track.group.trail.end(well=error is None)
            with track.state.lock:
                track.running = None
                self._begin(track)
            request.work.finish(error)
            if request is only:
                break
        with track.state.lock:
            track.note_told()
            track.busy = bool(track.queue)
        if track.busy:
            self._crew.do(lambda: self._work_off(track))

    def _without_graph(
        self, track: _Track, generation: GroupGeneration, request: OperationRequest
    ) -> CommError | ValueError | None:
        """Execute it without autograd: what is communicated may belong to a graph, communicating never does."""
        graph = not request.barrier and torch.is_grad_enabled()
        if graph:
            torch.set_grad_enabled(False)
        try:
            return self._execute(track, generation, request)
        finally:
            if graph:
                torch.set_grad_enabled(True)

    def await_former(self) -> None:
        """Wait until no operation of a former generation, nor a callback of it, writes into a tensor.

        Not allowed in a thread that executes operations.
        """
        for track in list(self._tracks.values()):
            with track.state.lock:
                if track.untold is None or track.untold is track.newest:
                    continue
                told = track.told = track.told or threading.Event()
            told.wait()

    def _execute(
        self, track: _Track, generation: GroupGeneration, request: OperationRequest
    ) -> CommError | ValueError | None:
        if generation.error is not None:
            return generation.error
        try:
            if not generation.begin(request):
                track.group.trail.wait("the wait for all members before the first of a view")
                self._open(track, generation, request)
            operation = _make(generation, request)
            if not isinstance(operation, ValueError):
                track.group.trail.begin(operation.description)
                generation.run(operation)
                return None
        except (MemberLost, Aborted, Timeout) as error:
            return self._fail(generation, error)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: a peer's garbage, a full /dev/shm, a bug
            return self._fail(generation, Aborted(f"{self._me!r}, {track.group.name!r}: {error!r}"))
        self._fail(generation, Aborted(f"{self._me!r} could not begin: {operation}"))
        return operation

    def _fail(self, generation: GroupGeneration, error: MemberLost | Aborted | Timeout) -> CommError:
        return self._host.fail(lambda: generation.error, error)

    def _open(self, track: _Track, generation: GroupGeneration, request: OperationRequest) -> None:
        """Show my rings to those that do not have them, and wait for the rings of the others."""
        number, state = track.group.number, track.state
        with state.lock:
            if generation.error is not None:
                raise generation.error
            if state.buffer is None:
                state.buffer = DoubleBuffer(self._host.scratch(DOUBLE_BUFFER_BYTES, torch.uint8))
                state.buffer.clear()
                state.ring = state.buffer.begin(generation.rings.generation)
            assert state.ring is not None
            ring, buffer = state.ring, state.buffer
            absent = tuple(m for m in generation.rings.members if m != self._me and m not in state.shown)
            state.shown.update(absent)
        if absent:
            self._host.show_rings(number, absent, buffer.tensor)
        generation.open(ring, self._rings.setdefault(number, {}).get, request)

    def close(self) -> None:
        """End the threads of the pool. All operations must have ended."""
        self._crew.close()


def _make(generation: GroupGeneration, request: OperationRequest) -> Operation | ValueError:
    try:
        return request.make(generation.participant)
    except (ValueError, RuntimeError) as error:  # torch raises RuntimeError for tensors that do not fit
        return ValueError(str(error))
