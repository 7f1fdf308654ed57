"""A simulator that plays a plan against a cost model, to judge the plan. Pure; its clock is a number.

A tier handles one request at a time to its end (one per direction if it is duplex), so a running write delays every
read. Of the waiting requests, it takes first those that computing waits for, then other reads, then writes. A piece
counts as memory from the start of its read until its copy is written after it leaves. A point starts once all its
pieces are in memory and the rest of its memory is free. The limit is never exceeded: a bad plan waits, maybe forever.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from elastrain.offload.planning.plan_values import (
    Budget,
    Move,
    Played,
    Program,
    Recomputation,
    Share,
    Tier,
    UnplayableError,
)
from elastrain.offload.planning.program import is_alive_across

STEPS = 3
"""Steps that are played. Only the last one is reported, since I/O at the end of a step overlaps with the next step."""


def replay(program: Program, moves: Sequence[Move], budget: Budget, recomputed: Sequence[Recomputation] = ()) -> Played:
    """Play a step with these moves, and return the result.

    Raises UnplayableError, naming the point and what it waits for.
    """
    step = _Replay(_Script(program, moves, recomputed), budget)
    for number in range(STEPS):
        step.play(number)
    return step.played()


class _Script:
    """The events of each point, by the point's index."""

    def __init__(self, program: Program, moves: Sequence[Move], recomputed: Sequence[Recomputation]) -> None:
        length = len(program.points)
        self.program = program
        self.write_after: dict[int, list[Move]] = defaultdict(list)
        self.leave_after: dict[int, list[int]] = defaultdict(list)
        self.read_at: dict[int, list[Move]] = defaultdict(list)
        self.die_after: dict[int, list[int]] = defaultdict(list)
        self.remade_at: dict[int, set[int]] = defaultdict(set)
        self.more_s: dict[int, float] = defaultdict(float)
        self.outside: set[int] = set()  # not in memory when a step begins
        for move in moves:
            self._add_move(move, length)
        for each in recomputed:
            self.die_after[each.after] += each.pieces
            self.remade_at[each.again].update(each.pieces)
            self.more_s[each.again] += each.seconds
        for index, piece in enumerate(program.pieces):
            for use, after in zip(piece.uses, (*piece.uses[1:], piece.uses[0]), strict=True):
                if after.begins:
                    self.die_after[use.point].append(index)
            if not is_alive_across(piece):
                self.outside.add(index)
        self.users: dict[int, list[tuple[int, bool, bool]]] = defaultdict(list)
        for index, piece in enumerate(program.pieces):
            for use in piece.uses:
                self.users[use.point].append((index, use.begins, use.changes or use.begins))

    def _add_move(self, move: Move, length: int) -> None:
        self.leave_after[move.gap.begin % length].append(move.gap.piece)
        self.read_at[move.read_at % length].append(move)
        if move.write_after is not None:
            self.write_after[move.write_after % length].append(move)
        if move.gap.begin < length <= move.read_at:
            self.outside.add(move.gap.piece)


@dataclass(kw_only=True)
class _PlayedPiece:
    """The state of one piece. With `in_memory` it counts against the limit; with `ready` it can be used."""

    size_bytes: int
    in_memory: bool
    ready: bool
    leaving: bool = False
    parts_written: int = 0
    """Writes that are queued or under way."""
    parts_read: int = 0


@dataclass(kw_only=True)
class _Request:
    """One request: the share of a piece on one tier. `due` is the place of the next use, counted over all steps."""

    piece: int
    share: Share
    is_write: bool
    due: int
    number: int


@dataclass(kw_only=True)
class _PlayedLane:
    """One queue of a tier. `busy` is True while the tier handles a request of it."""

    tier: Tier
    waiting: list[_Request] = field(default_factory=list)
    busy: bool = False


class _Io:
    """The queues of all tiers, and the times at which their current requests end."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._writes = [_PlayedLane(tier=tier) for tier in tiers]
        self._reads = [
            _PlayedLane(tier=tier) if tier.duplex else lane for tier, lane in zip(tiers, self._writes, strict=True)
        ]
        self._events: list[tuple[float, int, _Request, _PlayedLane]] = []
        self._numbers = 0
        self.moved_bytes = [0, 0]  # read, written

    def submit(self, piece: int, shares: Sequence[Share], *, is_write: bool, due: int, now_s: float) -> None:
        """Queue one request for each share."""
        for share in shares:
            lane = (self._writes if is_write else self._reads)[share.tier]
            self._numbers += 1
            lane.waiting.append(_Request(piece=piece, share=share, is_write=is_write, due=due, number=self._numbers))
            self.moved_bytes[is_write] += share.size_bytes
            self._serve(lane, now_s, wanted=-1)

    def next_s(self) -> float | None:
        """Return the time at which the next request ends, or None if no request is running."""
        return self._events[0][0] if self._events else None

    def end_one(self, wanted: int) -> _Request:
        """End the next request. Its queue goes on, first with requests that are due by `wanted`."""
        at_s, _, request, lane = heapq.heappop(self._events)
        lane.busy = False
        self._serve(lane, at_s, wanted=wanted)
        return request

    def _serve(self, lane: _PlayedLane, now_s: float, *, wanted: int) -> None:
        if lane.busy or not lane.waiting:
            return
        request = min(lane.waiting, key=lambda each: (each.is_write, each.due > wanted, each.number))
        lane.waiting.remove(request)
        lane.busy = True
        move_s = lane.tier.write_s if request.is_write else lane.tier.read_s
        heapq.heappush(self._events, (now_s + move_s(request.share.size_bytes), request.number, request, lane))


class _Replay:
    """The state of memory, pieces and queues while steps are played."""

    def __init__(self, script: _Script, budget: Budget) -> None:
        self._script = script
        self._limit_bytes = budget.limit_bytes
        self._length = len(script.program.points)
        self._pieces = [
            _PlayedPiece(
                size_bytes=piece.size_bytes, in_memory=index not in script.outside, ready=index not in script.outside
            )
            for index, piece in enumerate(script.program.pieces)
        ]
        self._memory_bytes = sum(piece.size_bytes for piece in self._pieces if piece.in_memory)
        self._peak_bytes = self._memory_bytes
        self._io = _Io(budget.tiers)
        self._asked: list[tuple[int, int, Move]] = []  # reads that wait for memory, ordered by due place
        self._now_s = 0.0
        self._step: tuple[float, list[float]] = (0.0, [])

    def play(self, number: int) -> None:
        """Play one step."""
        began_s, stalls_s = self._now_s, []
        self._io.moved_bytes = [0, 0]
        if self._memory_bytes > self._limit_bytes:
            raise UnplayableError(f"a step begins with {self._memory_bytes} bytes, above the limit")
        for place in range(self._length):
            stalls_s.append(self._begin(place, number * self._length + place))
            self._run(place)
            self._end(place, number * self._length + place)
        self._step = (self._now_s - began_s, stalls_s)

    def played(self) -> Played:
        """Return the result of the last step."""
        step_s, stalls_s = self._step
        read_bytes, written_bytes = self._io.moved_bytes
        return Played(
            step_s=step_s,
            stalls_s=tuple(stalls_s),
            peak_bytes=self._peak_bytes,
            written_bytes=written_bytes,
            read_bytes=read_bytes,
        )

    def _begin(self, place: int, now: int) -> float:
        """Wait until the point can start, and return the seconds waited."""
        began_s = self._now_s
        for move in self._script.read_at[place]:
            self._ask(move, now)
        self._grant()
        fresh = [index for index, begins, _ in self._script.users[place] if begins] + list(
            self._script.remade_at[place]
        )
        new = [index for index in dict.fromkeys(fresh) if not self._pieces[index].in_memory]
        want_bytes = sum(self._pieces[index].size_bytes for index in new) + self._extra_bytes(place)
        self._wait(place, now, lambda: self._is_there(place, set(fresh)))
        self._wait(place, now, lambda: self._memory_bytes + want_bytes <= self._limit_bytes)
        for index in fresh:
            self._pieces[index].in_memory = self._pieces[index].ready = True
        self._take(want_bytes)
        return self._now_s - began_s

    def _is_there(self, place: int, fresh: set[int]) -> bool:
        for index, _, changes in self._script.users[place]:
            piece = self._pieces[index]
            if not (piece.ready or index in fresh) or (changes and piece.parts_written):
                return False
        return True

    def _wait(self, place: int, now: int, is_done: Callable[[], bool]) -> None:
        while not is_done():
            next_s = self._io.next_s()
            if next_s is None:
                name, lacking = self._script.program.points[place].name, ", ".join(self._lacking(place))
                raise UnplayableError(f"{name} waits for ever for {lacking or 'memory'}")
            self._now_s = max(self._now_s, next_s)
            self._finish_one(wanted=now)

    def _lacking(self, place: int) -> Iterator[str]:
        for index, begins, _ in self._script.users[place]:
            if not (self._pieces[index].ready or begins):
                yield self._script.program.pieces[index].name

    def _run(self, place: int) -> None:
        """Let the point's own seconds pass, while the tiers handle their requests."""
        seconds = self._script.program.points[place].seconds + self._script.more_s[place]
        until_s = self._now_s + seconds
        while (next_s := self._io.next_s()) is not None and next_s <= until_s:
            self._now_s = max(self._now_s, next_s)
            self._finish_one(wanted=-1)
        self._now_s = until_s

    def _end(self, place: int, now: int) -> None:
        self._memory_bytes -= self._extra_bytes(place)
        for index in self._script.die_after[place]:
            self._drop(self._pieces[index])
        for move in self._script.write_after[place]:
            piece = self._pieces[move.gap.piece]
            piece.parts_written += len(move.shares)
            self._io.submit(move.gap.piece, move.shares, is_write=True, due=now, now_s=self._now_s)
        for index in self._script.leave_after[place]:
            self._pieces[index].leaving = True
            self._leave_if_written(self._pieces[index])
        self._grant()

    def _ask(self, move: Move, now: int) -> None:
        piece = self._pieces[move.gap.piece]
        if piece.in_memory:  # it is still in memory, so it simply stays
            piece.leaving = False
            return
        heapq.heappush(self._asked, (now + move.gap.end - move.read_at, move.gap.piece, move))

    def _grant(self) -> None:
        """Start reads in the order in which they are due, as long as memory is free."""
        while self._asked:
            due, _, move = self._asked[0]
            piece = self._pieces[move.gap.piece]
            if self._memory_bytes + piece.size_bytes > self._limit_bytes:
                return
            heapq.heappop(self._asked)
            piece.in_memory, piece.parts_read = True, len(move.shares)
            self._take(piece.size_bytes)
            self._io.submit(move.gap.piece, move.shares, is_write=False, due=due, now_s=self._now_s)

    def _finish_one(self, *, wanted: int) -> None:
        request = self._io.end_one(wanted)
        piece = self._pieces[request.piece]
        if request.is_write:
            piece.parts_written -= 1
            self._leave_if_written(piece)
        else:
            piece.parts_read -= 1
            piece.ready = not piece.parts_read
        self._grant()

    def _leave_if_written(self, piece: _PlayedPiece) -> None:
        if piece.leaving and not piece.parts_written:
            self._drop(piece)

    def _drop(self, piece: _PlayedPiece) -> None:
        self._memory_bytes -= piece.size_bytes * piece.in_memory
        piece.in_memory = piece.ready = piece.leaving = False

    def _take(self, size_bytes: int) -> None:
        self._memory_bytes += size_bytes
        self._peak_bytes = max(self._peak_bytes, self._memory_bytes)

    def _extra_bytes(self, place: int) -> int:
        return self._script.program.points[place].extra_bytes
