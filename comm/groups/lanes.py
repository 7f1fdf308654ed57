"""All lanes of a communicator: who executes which operation in which thread, and the boards of the others.

The operations of a group are executed one after the other, by the thread that asks for the first one if it wants that,
else by one of the crew. Nothing here decides about failures: that is `Failing`'s.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from elastrain.comm.collectives.operations import Operation, Seat
from elastrain.comm.errors import Aborted, CommError, MemberLost, ProtocolError, Timeout
from elastrain.comm.groups.board import MEMBERS_MAX, PAIR_BYTES, Pair
from elastrain.comm.groups.crew import Crew
from elastrain.comm.groups.group import Group, MakeOperation
from elastrain.comm.groups.lane import Desk, Host, Lane
from elastrain.comm.groups.work import Work
from elastrain.comm.shm.memory import futex_wake_all


@dataclass(kw_only=True)
class Request:
    """One call of a collective. `barrier`: it is one, over which a lane may open."""

    work: Work
    make: MakeOperation
    deadline_s: float
    timeout_s: float
    barrier: bool = False


class Failing(Host, Protocol):
    """What the executors ask of their communicator, from any thread."""

    def fail(self, lane: Lane, error: MemberLost | Aborted | Timeout) -> CommError:
        """Fail everything, unless the lane has ended already; returns what it ended with."""

    def show_board(self, group: int, members: tuple[str, ...], board: torch.Tensor) -> None:
        """Give these members my board of this group."""


@dataclass(kw_only=True, eq=False)
class _Track:
    """What goes on in one group."""

    group: Group
    desk: Desk = field(default_factory=Desk)
    lane: Lane | None = None  # None: its parts travel as messages
    queue: collections.deque[tuple[Lane, Request]] = field(default_factory=collections.deque)
    busy: bool = False  # somebody works off the queue
    running: Lane | None = None  # in which an operation is under way
    unheard: Lane | None = None  # as `running`, until its caller has been told, too
    heard: threading.Event | None = None  # somebody waits for that


class Lanes:
    """`renew`, `end` and `hear_board` are called by the communicator's thread, the others by any."""

    def __init__(self, host: Failing, me: str) -> None:
        self._host, self._me = host, me
        self._generation = 0
        self._tracks: dict[int, _Track] = {}
        self._boards: dict[int, dict[str, Pair]] = {}  # by group and member
        self._waiting: set[Lane] = set()
        self._crew = Crew("elastrain-collectives")

    def add(self, group: Group, *, by_lane: bool) -> None:
        track = self._tracks[group.number] = _Track(group=group)
        with track.desk.lock:
            self._renew(track, by_lane=by_lane)

    def renew(self, generation: int, members: Sequence[str], by_lane: Callable[[Group], bool]) -> object:
        """Begin a generation. What was under way has been ended. Returns what is not needed any more, memory of the
        removed with it: to let go of it takes long.
        """
        gone: list[object] = [self._boards]
        kept = [(n, {m: pair for m, pair in pairs.items() if m in members}) for n, pairs in list(self._boards.items())]
        self._boards = dict(kept)
        former, self._generation = self._generation, generation
        for number, track in list(self._tracks.items()):
            with track.desk.lock:
                gone += (track.lane, track.desk.readers)
                # Who has taken part has my board; on its way to others it may have been discarded with the generation.
                fresh = track.desk.shown - track.desk.met
                track.desk.met |= {member for member in fresh if self._took_part(number, member, former)}
                track.desk.met &= set(members)
                track.desk.view = frozenset(members)
                track.desk.readers = {m: pair for m, pair in track.desk.readers.items() if m in members}
                track.desk.shown = set(track.desk.met)
                self._renew(track, by_lane=by_lane(track.group))
        return gone

    def _took_part(self, number: int, member: str, generation: int) -> bool:
        pair = self._boards.get(number, {}).get(member)
        board = None if pair is None else pair.find(generation)
        return board is not None and board.published(generation) > 0

    def _renew(self, track: _Track, *, by_lane: bool) -> None:
        group = track.group
        track.lane = None
        if by_lane and len(group.members) <= MEMBERS_MAX and self._me in group.members:
            track.lane = Lane(
                self._host,
                track.desk,
                name=group.name,
                me=self._me,
                members=group.members,
                generation=self._generation,
                waiting=self._waiting,
            )
        self._begin(track)

    def _begin(self, track: _Track) -> None:
        """Name the newest generation on my board, for the others: I read nothing of former ones any more.

        While an operation of a former one is under way that is not so; it is done when that ends.
        """
        pair, former = track.desk.pair, track.running is not None and track.running is not track.lane
        if pair is not None and not former and pair.newest < self._generation:
            track.desk.board = pair.begin(self._generation)
            futex_wake_all(pair.era_address)

    def end(self, error: CommError) -> None:
        """Whatever waits, or comes later in this generation, ends with this error."""
        for track in list(self._tracks.values()):
            with track.desk.lock:
                if track.lane is not None and track.lane.error is None:
                    track.lane.error = error

    @property
    def anybody_waits(self) -> bool:
        """Whether the alarm has to be rung after a change."""
        return bool(self._waiting)

    def hear_board(self, group: int, member: str, tensor: torch.Tensor) -> None:
        """Raises ProtocolError."""
        if tensor.dtype != torch.uint8 or tensor.numel() != PAIR_BYTES:
            raise ProtocolError(f"boards of {tensor.numel()} {tensor.dtype}, {PAIR_BYTES} bytes were expected")
        self._boards.setdefault(group, {})[member] = Pair(tensor)

    def submit(self, group: Group, request: Request, *, inline: bool) -> bool:
        """Execute it after what was submitted before, in this thread with `inline` if nothing was; False: this group
        has no lane."""
        track = self._tracks[group.number]
        with track.desk.lock:
            if track.lane is None:
                return False
            track.queue.append((track.lane, request))
            if track.busy:
                return True
            track.busy = True
        if inline:
            self._work_off(track, only=request)
        else:
            self._crew.do(lambda: self._work_off(track))
        return True

    def _work_off(self, track: _Track, only: Request | None = None) -> None:
        while True:
            with track.desk.lock:
                _heard(track)
                if not track.queue:
                    track.busy = False
                    return
                lane, request = track.queue.popleft()
                track.running = track.unheard = lane
            graph = not request.barrier and torch.is_grad_enabled()
            if graph:  # what is communicated may belong to one, communicating never does
                torch.set_grad_enabled(False)
            try:
                error = self._execute(track, lane, request)
            finally:
                if graph:
                    torch.set_grad_enabled(True)
            with track.desk.lock:
                track.running = None
                self._begin(track)
            request.work.finish(error)
            if request is only:
                break
        with track.desk.lock:
            _heard(track)
            track.busy = bool(track.queue)
        if track.busy:
            self._crew.do(lambda: self._work_off(track))

    def await_former(self) -> None:
        """Until no operation of a former generation is under way here, nor what its callers have asked to be done after
        it: none of them writes into a tensor any more. By no thread that executes operations.
        """
        for track in list(self._tracks.values()):
            with track.desk.lock:
                if track.unheard is None or track.unheard is track.lane:
                    continue
                heard = track.heard = track.heard or threading.Event()
            heard.wait()

    def _execute(self, track: _Track, lane: Lane, request: Request) -> CommError | ValueError | None:
        if lane.error is not None:
            return lane.error
        try:
            if not lane.open:
                self._open(track, lane, request)
            lane.begin(request.deadline_s, request.timeout_s)
            operation = self._make(lane, request)
            if not isinstance(operation, ValueError):
                lane.run(operation)
                return None
        except (MemberLost, Aborted, Timeout) as error:
            return self._host.fail(lane, error)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: a peer's garbage, a full /dev/shm, a bug
            return self._host.fail(lane, Aborted(f"{self._me!r}, {track.group.name!r}: {error!r}"))
        self._host.fail(lane, Aborted(f"{self._me!r} could not begin: {operation}"))
        return operation

    def _make(self, lane: Lane, request: Request) -> Operation | ValueError:
        try:
            return request.make(Seat(rank=lane.rank, world=len(lane.members), memory=lane, stage=lane.stage))
        except (ValueError, RuntimeError) as error:  # torch raises RuntimeError for tensors that do not fit
            return ValueError(str(error))

    def _open(self, track: _Track, lane: Lane, request: Request) -> None:
        """Show my board to those who do not have it, and wait for the boards of the others."""
        number = track.group.number
        with track.desk.lock:
            if lane.error is not None:
                raise lane.error
            desk = track.desk
            if desk.pair is None:
                desk.pair = Pair(self._host.scratch(PAIR_BYTES, torch.uint8))
                desk.pair.clear()
                desk.board = desk.pair.begin(lane.generation)
            assert desk.board is not None
            board, pair = desk.board, desk.pair
            absent = tuple(m for m in lane.members if m != self._me and m not in desk.shown)
            desk.shown.update(absent)
        if absent:
            self._host.show_board(number, absent, pair.tensor)
        find = self._boards.setdefault(number, {}).get
        lane.open_up(board, find, request.deadline_s, request.timeout_s, by_barrier=request.barrier)

    def close(self) -> None:
        """Give the threads back; everything has been ended."""
        self._crew.close()


def _heard(track: _Track) -> None:
    """The callers of all operations that have ended know of it. With the desk's lock."""
    track.unheard = None
    if track.heard is not None:
        track.heard.set()
        track.heard = None
