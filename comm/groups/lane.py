"""A group of members on one host in one generation: operations by boards and waits, in the thread that calls.

All members count the same turns: one for each round of each operation, whether they have anything to say in it or not.
A member may run `ENTRIES` turns ahead of what others have finished, so nothing on a board is written over while it is
read. Nothing here knows of sockets; what a lane needs of its communicator is `Host`.

An error of the communicator ends waiting, not work: an operation that has begun and finds everything that it needs on
the boards ends well, whatever has failed and whichever views have come meanwhile. So what one member has completed, all
complete who had begun it and are still there. What they read is not written over before: see `board`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import torch

from elastrain.comm.collectives.algorithms import Round
from elastrain.comm.collectives.operations import NOTHING, STAGE_BYTES, Operation
from elastrain.comm.errors import Aborted, CommError, MemberLost, ProtocolError, Timeout
from elastrain.comm.groups.board import ENTRIES, ROOM_BYTES, WORDS_MAX_BYTES, Board, Entry, Pair, Spot, reached
from elastrain.comm.shm.alarm import Alarm
from elastrain.comm.shm.memory import futex_wake_all

Found = TypeVar("Found")
_ROOM = Spot(segment=0, offset_bytes=0)
_NEVER = 1 << 30  # turns ahead: far from both ends of what `reached` can tell


class Host(Protocol):
    """What a lane asks of its communicator, from any thread."""

    alarm: Alarm

    def why_gone(self, member: str) -> MemberLost | None:
        """The error of who waits for a member from which nothing more comes, though its end breaks nothing off."""

    def is_linked(self, member: str) -> bool:
        """Whether more may come from it: it is in the view, and not lost."""

    def is_ahead(self, member: str) -> bool:
        """Whether it was heard of in a newer generation."""

    def place(self, tensor: torch.Tensor) -> Spot | None:
        """Where it lies in shared memory that the others were told of, or will be before they read it."""

    def segment(self, member: str, number: int) -> torch.Tensor | None:
        """All bytes of a member's segment; None while it has not come here."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """As SharedMemory.empty."""

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """As SharedMemory.scratch."""


@dataclass(kw_only=True, eq=False)
class Desk:
    """What a group keeps from one generation to the next. `lock`: for what begins and ends."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    pair: Pair | None = None
    board: Board | None = None  # of the newest generation begun
    readers: dict[str, Pair] = field(
        default_factory=dict
    )  # who may read what was published last, as far as in the view
    view: frozenset[str] | None = None  # members of the newest view, which readers are of; None before the first
    shown: set[str] = field(default_factory=set)  # members that were given my board
    met: set[str] = field(default_factory=set)  # members that have it, for they have taken part
    stage: torch.Tensor | None = None
    kept: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # not to be used again before a turn is finished


class Lane:
    """Used by one thread at a time. `waiting` holds the lane while it waits: who changes what it waits for rings."""

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
        self.error: CommError | None = None  # set by the communicator: the end of all waiting in this lane
        self.members = tuple(members)
        self.generation = generation
        self.rank = self.members.index(me)
        self._name, self._me, self._host, self._desk = name, me, host, desk
        self._waiting = waiting
        # In the order in which they are waited for: where they begin one after the other the last comes last.
        self._others = [*reversed(range(self.rank)), *reversed(range(self.rank + 1, len(self.members)))]
        self._board: Board  # mine, from `open_up` on
        self._find: Callable[[str], Pair | None] = lambda _member: None
        self._pairs: dict[int, Pair] = {}
        self._boards: dict[int, Board] = {}
        self._opened = self._meeting = False
        self._turn = 0
        self._deadline_s = self._timeout_s = 0.0
        self._words = ""
        self._placed: tuple[torch.Tensor, Spot] | None = None

    @property
    def open(self) -> bool:
        return self._opened

    def open_up(
        self,
        board: Board,
        find: Callable[[str], Pair | None],
        deadline_s: float,
        timeout_s: float,
        *,
        by_barrier: bool = False,
    ) -> None:
        """Before anything else: wait until all others are in this generation. Raises as `run`.

        From then on nobody reads what was shown in former ones. `by_barrier`: a barrier is run next. Who comes out of
        one knows just that, so nobody needs to wait twice; and if it fails, nobody has come out of it before.
        """
        self._board, self._find = board, find
        self._deadline_s, self._timeout_s = deadline_s, timeout_s
        self._words = f"the beginning of {self._name!r}"
        self._meeting = by_barrier and self._all_known()
        if self._meeting:
            return
        for rank in self._others:
            pair = self._pairs[rank] = self._wait(partial(find, self.members[rank]), self.members[rank])
            self._boards[rank] = self._wait(partial(pair.find, self.generation), self.members[rank])
        self._await_leavers()
        self._settle()

    def _all_known(self) -> bool:
        """Whether I have the boards of all others, and only they may read what I have published last."""
        if not self._desk.readers.keys() <= set(self.members):
            return False
        found = {rank: self._find(self.members[rank]) for rank in self._others}
        self._pairs = {rank: pair for rank, pair in found.items() if pair is not None}
        return len(self._pairs) == len(self._others)

    def _settle(self) -> None:
        """All others are in this generation, or have been."""
        desk = self._desk
        assert desk.pair is not None
        desk.pair.free_former()
        desk.kept.clear()
        readers = {self.members[rank]: pair for rank, pair in self._pairs.items()}
        with desk.lock:  # a newer view may have come meanwhile: who is not in it is never waited for
            desk.readers = {m: pair for m, pair in readers.items() if desk.view is None or m in desk.view}
        for rank, pair in self._pairs.items():
            if rank not in self._boards:
                self._boards[rank] = pair.of_or_any(self.generation)
        self._opened, self._meeting = True, False

    def _await_leavers(self) -> None:
        """Members of the view that are in this group no more may still read what I have published last."""
        former = self._desk.pair.former if self._desk.pair else None
        if former is None:
            return
        generation, count = former.generation, former.published(former.generation)
        for member, pair in list(self._desk.readers.items()):
            if member not in self.members:
                self._wait(partial(self._look_done, member, pair, generation, count), member)

    def _look_done(self, member: str, pair: Pair, generation: int, count: int) -> bool | None:
        """True when this member reads nothing any more that was published in the generation, `count` turns."""
        board = pair.find(generation)
        finished = 0 if board is None else board.finished(generation)
        return pair.newest > generation or reached(finished, count) or self._host.why_gone(member) is not None or None

    # An operation

    def begin(self, deadline_s: float, timeout_s: float) -> None:
        """Wait until the first turn's place on the board is free. Raises as `run`."""
        self._deadline_s, self._timeout_s = deadline_s, timeout_s
        self._words = "a place on the board"
        if not self._meeting:
            self._await_place()

    def run(self, operation: Operation) -> None:
        """Raises MemberLost, Aborted, Timeout, or a ProtocolError; the lane is of no use then.

        Others know of a failure before the caller does, who may change its tensors then.
        """
        try:
            self._run(operation)
        except BaseException:
            self._board.fail()
            raise
        finally:
            self._placed = None  # it may be the caller's tensor

    def _run(self, operation: Operation) -> None:
        self._words = operation.words
        words = self._words.encode()[:WORDS_MAX_BYTES]
        lenders: set[int] = set()
        read: set[int] = set()
        for number, plan in enumerate(operation.rounds):
            last = number == len(operation.rounds) - 1
            if number and not plan.again and not self._meeting:
                self._await_place()
            offered = operation.offer(number) if plan.sends or plan.again else NOTHING
            if not last:
                self._check_lent(lenders)
            self._publish(words, offered, plan, lent=operation.lends and not number)
            late = [rank for rank in self._others if rank in plan.awaits and self._await_part(rank)]
            if late:
                # Who came last comes last again: one sleep, and the others are there.
                self._others.remove(late[-1])
                self._others.insert(0, late[-1])
            for rank in () if plan.again else plan.awaits:
                entry = self._take(operation, number, rank, words)
                if entry.lent:
                    lenders.add(rank)
                if entry.size_bytes or last:
                    read.add(rank)
            operation.finish(number)
            if self._meeting and plan.awaits:
                self._settle()  # rank 0 has seen all, the others have its word that it has
            if last:
                self._check_there(read)  # before the others are told: then they need keep nothing for this member
                # Once an operation: in none more than ENTRIES rounds show anything, so none waits for its own turns.
                self._board.count_finished(self._turn)
                futex_wake_all(self._board.finished_address)
            self._turn += 1
        if len(self._desk.met) < len(self._others):
            here = [rank for rank, board in self._boards.items() if board.published(self.generation)]
            self._desk.met.update(self.members[rank] for rank in here)

    def _publish(self, words: bytes, offered: torch.Tensor, plan: Round, *, lent: bool) -> None:
        if not plan.again:
            given = offered if offered is not NOTHING and offered.numel() else None
            spot = _ROOM if given is None else self._spot(given)
            self._board.write(self._turn, words=words, offered=given, spot=spot, sends=plan.sends, lent=lent)
        self._board.count_published(self._turn)
        if plan.sends or (plan.again and plan.awaits):  # else nobody awaits it: who sleeps here awaits a later one
            futex_wake_all(self._board.published_address)

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

    def _take(self, operation: Operation, number: int, rank: int, words: bytes) -> Entry:
        board, member = self._boards[rank], self.members[rank]
        entry = board.read(self._turn, self.rank)
        if entry.words != words:
            theirs = entry.words.decode(errors="replace")
            raise Aborted(f"{self._name!r}: {self._words} at {self._me!r}, {theirs} at {member!r}")
        try:
            operation.take(number, rank, self._pull(rank, entry))
        except ValueError as error:
            raise Aborted(f"{self._words} of {self._name!r} at {self._me!r}: {error}") from error
        return entry

    def _pull(self, rank: int, entry: Entry) -> torch.Tensor:
        if not entry.size_bytes:
            return NOTHING
        if entry.spot.segment:
            memory = self._await_segment(rank, entry.spot.segment)
        else:
            memory = self._boards[rank].room(self._turn)
        start, stop = entry.spot.offset_bytes, entry.spot.offset_bytes + entry.size_bytes
        if stop > memory.numel():
            raise ProtocolError(f"{self.members[rank]!r} offers bytes {start} to {stop} of {memory.numel()}")
        return memory[start:stop].view(entry.dtype)

    def _check_lent(self, lenders: Set[int]) -> None:
        """A member that has failed since may have changed its tensor while it was read: what was made of it is thrown
        away, and the member's word why, its death, or the next view is waited for.
        """
        for rank in lenders:
            board = self._boards[rank]
            if board.has_failed(self.generation):
                self._await(rank, board.published_address, board.has_published, self._turn + _NEVER)

    def _check_there(self, read: Set[int]) -> None:
        """Who was removed from the group meanwhile may have read what others had written over."""
        for rank in read:
            if self._boards[rank].generation != self.generation:
                raise self.error or Aborted(f"{self.members[rank]!r} went on to a newer view")

    # Waits

    def _await_place(self) -> None:
        wanted = self._turn - ENTRIES + 1
        for rank in self._others if wanted > 0 else ():
            board = self._boards[rank]
            if not board.has_finished(self.generation, wanted):
                self._await(rank, board.finished_address, board.has_finished, wanted)

    def _await_part(self, rank: int) -> bool:
        """Returns whether it was not there at once."""
        if rank not in self._boards:
            begun = partial(self._pairs[rank].find, self.generation)
            self._boards[rank] = self._wait(begun, self.members[rank])
        board = self._boards[rank]
        if board.has_published(self.generation, self._turn + 1):
            return False
        self._await(rank, board.published_address, board.has_published, self._turn + 1)
        return True

    def _await(self, rank: int, address: int, has: Callable[[int, int], bool | None], wanted: int) -> None:
        self._wait(partial(has, self.generation, wanted), self.members[rank], address)

    def _wait(
        self, look: Callable[[], Found | None], member: str, address: int | None = None, *, by_link: bool = False
    ) -> Found:
        """What `look` finds, as soon as it does: asked again when the word at `address` changes, the member begins a
        generation, or the alarm rings.
        """
        found = look()
        if found is not None:
            return found
        self._waiting.add(self)
        try:
            while found is None:
                # In this order: what changes after the alarm was looked at rings it, and the wait returns at once.
                alarm, words = self._host.alarm.count, self._words_of(member, address)
                found = look()
                if found is not None:
                    break
                error = self._why_not(member, by_link=by_link)
                if error is None:
                    self._host.alarm.wait(alarm, words, self._deadline_s)
                found = look()  # with an error, too: it may have come in the end
                if found is None and error is not None:
                    raise error
            return found
        finally:
            self._waiting.discard(self)

    def _words_of(self, member: str, address: int | None) -> list[tuple[int, int]]:
        pair = self._find(member)
        addresses = [] if pair is None else [pair.era_address]
        if address is not None:
            addresses.append(address)
        return [(one, ctypes.c_uint32.from_address(one).value) for one in addresses]

    def _why_not(self, member: str, *, by_link: bool) -> CommError | None:
        """Why it makes no sense to wait for this member. `by_link`: for what comes in order with its messages: it may
        be on its way although the board is ahead, and whatever has failed here meanwhile.
        """
        if self.error is not None and not (by_link and self._host.is_linked(member)):
            return self.error
        gone = self._host.why_gone(member)
        if gone is not None:
            return gone
        pair = None if by_link else self._find(member)
        # Whoever has a board names the new generation there when it has done with this one, and not before.
        if self._host.is_ahead(member) if pair is None else pair.newest > self.generation:
            return Aborted(f"{member!r} went on to a newer view")
        if time.monotonic() >= self._deadline_s:
            missing = self._absent(member)
            words = f"{self._words}: nothing from {', '.join(missing)} within {self._timeout_s} s"
            return Timeout(words, missing=missing)
        return None

    def _absent(self, awaited: str) -> tuple[str, ...]:
        """Who has not come so far, the awaited one at least."""
        silent = [self.members[rank] for rank in sorted(self._others) if not self._is_there(rank)]
        return tuple(silent) if awaited in silent else (*silent, awaited)

    def _is_there(self, rank: int) -> bool:
        if self._opened:
            return bool(self._boards[rank].has_published(self.generation, self._turn + 1))
        pair = self._find(self.members[rank])
        return pair is not None and pair.find(self.generation) is not None

    def _await_segment(self, rank: int, number: int) -> torch.Tensor:
        member = self.members[rank]
        return self._wait(partial(self._host.segment, member, number), member, by_link=True)

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
        """See operations.Seat."""
        if self._desk.stage is None:
            self._desk.stage = self._host.empty(STAGE_BYTES, torch.uint8)
        return self._desk.stage
