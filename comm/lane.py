"""A group of members on one host in one generation: operations by boards and waits, in the thread that calls.

All members count the same turns: one for each round of each operation, whether they have anything to say in it or not.
A member may run `ENTRIES` turns ahead of what others have finished, so nothing on a board is written over while it is
read. Nothing here knows of sockets; what a lane needs of its communicator is `Host`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import torch

from elastrain.comm.alarm import Alarm
from elastrain.comm.algorithms import Send
from elastrain.comm.board import ENTRIES, ROOM_BYTES, WORDS_MAX_BYTES, Board, Entry, Pair, Spot, reached
from elastrain.comm.errors import Aborted, CommError, ProtocolError, Timeout
from elastrain.comm.memory import futex_wake_all
from elastrain.comm.operations import STAGE_BYTES, Operation

Found = TypeVar("Found")
_NOTHING = torch.empty(0)
_ROOM = Spot(segment=0, offset_bytes=0)
_NEVER = 1 << 30  # turns ahead: far from both ends of what `reached` can tell


class Host(Protocol):
    """What a lane asks of its communicator, from any thread."""

    alarm: Alarm

    def why_silent(self, member: str) -> CommError | None:
        """Why nothing more comes from this member in this generation; None: it may come."""

    def place(self, tensor: torch.Tensor) -> Spot | None:
        """Where it lies in shared memory that the others were told of, or will be before they read it."""

    def segment(self, member: str, number: int) -> torch.Tensor | None:
        """All bytes of a member's segment; None while it has not come here."""

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """As Mesh.scratch."""


@dataclass(kw_only=True, eq=False)
class Desk:
    """What a group keeps from one generation to the next. `lock`: for what is written on the board, and `error`s."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    pair: Pair | None = None
    board: Board | None = None  # of this generation
    shown: set[str] = field(default_factory=set)  # members that were given my board
    met: set[str] = field(default_factory=set)  # members that have it, for they have taken part
    stage: torch.Tensor | None = None
    kept: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # not to be used again before a turn is finished


class Lane:
    """Used by one thread at a time. `waiting` holds the lane while it waits: who changes what it waits for rings."""

    pulls = True

    def __init__(
        self,
        host: Host,
        desk: Desk,
        *,
        name: str,
        me: str,
        members: Sequence[str],
        generation: int,
        waiting: set[Lane],
    ) -> None:
        self.error: CommError | None = None  # set by the communicator: the end of everything in this lane
        self.members = tuple(members)
        self.generation = generation
        self.rank = self.members.index(me)
        self._name, self._me, self._host, self._desk = name, me, host, desk
        self._waiting = waiting
        self._others = [(self.rank + step) % len(members) for step in range(1, len(members))]
        self._own: Board | None = None
        self._find: Callable[[str], Pair | None] = lambda _member: None
        self._pairs: dict[int, Pair] = {}
        self._boards: dict[int, Board] = {}
        self._opened = False
        self._turn = 0
        self._deadline_s = self._timeout_s = 0.0
        self._words = ""
        self._placed: tuple[torch.Tensor, Spot] | None = None

    @property
    def open(self) -> bool:
        return self._opened

    def open_up(self, board: Board, find: Callable[[str], Pair | None], deadline_s: float, timeout_s: float) -> None:
        """Before anything else: wait until all others are in this generation. Raises as `run`.

        From then on nobody reads what was shown in former ones.
        """
        self._own, self._find = board, find
        self._deadline_s, self._timeout_s = deadline_s, timeout_s
        self._words = f"the beginning of {self._name!r}"
        for rank in self._others:
            pair = self._pairs[rank] = self._wait(partial(find, self.members[rank]), rank)
            look = partial(pair.find, self.generation)
            self._boards[rank] = self._wait(look, rank, pair.era_address)
        self._desk.kept.clear()
        self._opened = True

    # An operation

    def begin(self, deadline_s: float, timeout_s: float) -> None:
        """Wait until the first turn's place on the board is free. Raises as `run`."""
        self._deadline_s, self._timeout_s = deadline_s, timeout_s
        self._words = "a place on the board"
        self._await_place()

    def run(self, operation: Operation) -> None:
        """Raises MemberLost, Aborted, Timeout, or a ProtocolError; the lane is of no use then."""
        try:
            self._run(operation)
        finally:
            self._placed = None  # it may be the caller's tensor

    def _run(self, operation: Operation) -> None:
        self._words = operation.words
        words = self._words.encode()[:WORDS_MAX_BYTES]
        fences: dict[int, int] = {}
        for number, plan in enumerate(operation.rounds):
            if number:
                self._await_place()
            offered = operation.offer(number) if plan.sends else _NOTHING
            self._publish(words, offered, plan.sends)
            late = [rank for rank in self._others if rank in plan.awaits and self._await_part(rank)]
            if late:
                # Who came last comes last again: one sleep, and the others are there.
                self._others.remove(late[-1])
                self._others.insert(0, late[-1])
            for rank in plan.awaits:
                self._take(operation, number, rank, words, fences)
            operation.finish(number)
            self._finish_turn()
        self._check_fences(fences)
        if len(self._desk.met) < len(self._others):
            here = [rank for rank, board in self._boards.items() if board.published(self.generation)]
            self._desk.met.update(self.members[rank] for rank in here)

    def _publish(self, words: bytes, offered: torch.Tensor, sends: Sequence[Send]) -> None:
        spot = self._spot(offered) if offered.numel() else _ROOM
        board = self._board
        with self._desk.lock:  # else the board might be in the next generation already
            if self.error is not None:
                raise self.error
            board.write(self._turn, words=words, offered=offered, spot=spot, sends=sends)
            board.count_published(self._turn)
        futex_wake_all(board.published_address)

    @property
    def _board(self) -> Board:
        assert self._own is not None
        return self._own

    def _spot(self, offered: torch.Tensor) -> Spot:
        if self._placed is not None and self._placed[0] is offered:
            return self._placed[1]
        room = self._board.room(self._turn)
        within = offered.data_ptr() - room.data_ptr()
        if 0 <= within < ROOM_BYTES:
            return Spot(segment=0, offset_bytes=within)
        spot = self._host.place(offered)
        if spot is None:
            raise CommError("a tensor was offered that does not lie in shared memory")  # a bug of an operation
        self._placed = (offered, spot)
        return spot

    def _take(self, operation: Operation, number: int, rank: int, words: bytes, fences: dict[int, int]) -> None:
        board, member = self._boards[rank], self.members[rank]
        entry = board.read(self._turn, self.rank)
        if entry.words != words:
            theirs = entry.words.decode(errors="replace")
            raise Aborted(f"{self._name!r}: {self._words} at {self._me!r}, {theirs} at {member!r}")
        fences.setdefault(rank, entry.fence)
        try:
            operation.take(number, rank, self._pull(rank, entry))
        except ValueError as error:
            raise Aborted(f"{self._words} of {self._name!r} at {self._me!r}: {error}") from error

    def _pull(self, rank: int, entry: Entry) -> torch.Tensor:
        if not entry.size_bytes:
            return _NOTHING
        if entry.spot.segment:
            memory = self._await_segment(rank, entry.spot.segment)
        else:
            memory = self._boards[rank].room(self._turn)
        start, stop = entry.spot.offset_bytes, entry.spot.offset_bytes + entry.size_bytes
        if stop > memory.numel():
            raise ProtocolError(f"{self.members[rank]!r} offers bytes {start} to {stop} of {memory.numel()}")
        return memory[start:stop].view(entry.dtype)

    def _finish_turn(self) -> None:
        with self._desk.lock:
            if self.error is not None:
                raise self.error
            self._board.count_finished(self._turn)
        futex_wake_all(self._board.finished_address)
        self._turn += 1

    def _check_fences(self, fences: Mapping[int, int]) -> None:
        """A member that has failed since may have changed its tensor while it was read: the result is thrown away, and
        its word why, its death, or the next view is waited for.
        """
        for rank, fence in fences.items():
            board = self._boards[rank]
            if board.fence != fence:
                never = self._turn + _NEVER
                self._await(rank, board.published_address, board.published, never)
        if self.error is not None:
            raise self.error

    # Waits

    def _await_place(self) -> None:
        for rank in self._others:
            board = self._boards[rank]
            wanted = self._turn - ENTRIES + 1
            if not reached(board.finished(self.generation), wanted):
                self._await(rank, board.finished_address, board.finished, wanted)

    def _await_part(self, rank: int) -> bool:
        """Returns whether it was not there at once."""
        board = self._boards[rank]
        if self._has_published(board):
            return False
        self._await(rank, board.published_address, board.published, self._turn + 1)
        return True

    def _await(self, rank: int, address: int, count: Callable[[int], int], wanted: int) -> None:
        self._wait(lambda: reached(count(self.generation), wanted) or None, rank, address)

    def _wait(self, look: Callable[[], Found | None], rank: int, address: int | None = None) -> Found:
        """What `look` finds, as soon as it does: asked again when the word at `address` changes or the alarm rings."""
        found = look()
        if found is not None:
            return found
        self._waiting.add(self)
        try:
            while True:
                # In this order: what changes after the alarm was looked at rings it, and the wait returns at once.
                alarm = self._host.alarm.count
                seen = alarm if address is None else ctypes.c_uint32.from_address(address).value
                found = look()
                if found is not None:
                    return found
                error = self._why_not(rank)
                if error is None:
                    where = self._host.alarm.address if address is None else address
                    self._host.alarm.wait(alarm, where, seen, self._deadline_s)
                elif (found := look()) is not None:  # it came in the end
                    return found
                else:
                    raise error
        finally:
            self._waiting.discard(self)

    def _why_not(self, rank: int) -> CommError | None:
        """Why it makes no sense to wait for this member."""
        error = self.error or self._host.why_silent(self.members[rank])
        if error is None and rank in self._pairs and self._pairs[rank].newest > self.generation:
            return Aborted(f"{self.members[rank]!r} went on to a newer view")
        if error is None and time.monotonic() >= self._deadline_s:
            missing = self._absent(rank)
            words = f"{self._words}: nothing from {', '.join(missing)} within {self._timeout_s} s"
            return Timeout(words, missing=missing)
        return error

    def _absent(self, awaited: int) -> tuple[str, ...]:
        """Who has not come so far, the awaited one at least."""
        silent = {rank for rank in self._others if not self._is_there(rank)}
        return tuple(self.members[rank] for rank in sorted({awaited} | silent))

    def _is_there(self, rank: int) -> bool:
        if self._opened:
            return self._has_published(self._boards[rank])
        pair = self._find(self.members[rank])
        return pair is not None and pair.find(self.generation) is not None

    def _has_published(self, board: Board) -> bool:
        return reached(board.published(self.generation), self._turn + 1)

    def _await_segment(self, rank: int, number: int) -> torch.Tensor:
        return self._wait(partial(self._host.segment, self.members[rank], number), rank)

    # Memory

    def owns(self, tensor: torch.Tensor) -> bool:
        """See operations.Memory."""
        return self._host.place(tensor) is not None

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See operations.Memory. For the turn that comes next."""
        if numel * dtype.itemsize <= ROOM_BYTES:
            return self._board.room(self._turn)[: numel * dtype.itemsize].view(dtype)
        finished = [board.finished(self.generation) for board in self._boards.values()]
        kept = self._desk.kept
        kept[:] = [(turn, old) for turn, old in kept if not all(reached(count, turn + 1) for count in finished)]
        tensor = self._host.scratch(numel, dtype)
        kept.append((self._turn, tensor))
        return tensor

    def stage(self) -> torch.Tensor:
        """See operations.Memory."""
        if self._desk.stage is None:
            self._desk.stage = self._host.scratch(STAGE_BYTES, torch.uint8)
        return self._desk.stage
