"""Members with real executors in threads of which one runs at a time: who is next is drawn at every step.

A step ends where a member waits, and before and after whatever an operation does. Memory, rings and executors are real;
messages, views and failures are played.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from elastrain.comm.collectives import calls
from elastrain.comm.collectives.algorithms import Round
from elastrain.comm.collectives.pulling import PulledReduce
from elastrain.comm.collectives.reducing import Operation, Participant
from elastrain.comm.errors import Aborted, CommError, MemberLost
from elastrain.comm.groups.members import MemberList
from elastrain.comm.groups.shared_executor import SharedMemoryExecutor
from elastrain.comm.groups.slot_ring import Location
from elastrain.comm.groups.works import OperationRequest, Work

KINDS = ("barrier", "small", "large", "lent", "mixed", "broadcast")
NUMEL = 256
_ARENA_BYTES = 24 << 20  # a double buffer, a stage, and tensors
_STEPS = 300  # then the rest is played in turn
_TURNS_MAX = 20_000


class Ended(BaseException):
    """The play is over: whoever is still on the stage goes."""


@dataclass(frozen=True, kw_only=True)
class Act:
    """A generation: who is in the view, who in the group, in which order, and the kinds of its operations."""

    view: str
    group: str
    kinds: tuple[str, ...]


class Player:
    """A thread that runs only between `step` and its next `pause`."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.done = self.over = False
        self.error: BaseException | None = None
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()

    def _run(self, body: Callable[[], None]) -> None:
        self._turn.acquire()
        try:
            body()
        except Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: the test raises it
            self.error = error
        self.done = True
        self._back.release()

    def step(self) -> None:
        self._turn.release()
        assert self._back.acquire(timeout=20), "a player neither pauses nor ends"
        if self.error is not None:
            raise self.error

    def pause(self) -> None:
        self._back.release()
        self._turn.acquire()
        if self.over:
            raise Ended

    def end(self) -> None:
        self.over = True
        while not self.done:
            self.step()
        self._thread.join(20)


@dataclass(kw_only=True)
class _Bell:
    """An alarm that never sleeps: whoever waits looks again when it is its turn."""

    pause: Callable[[], None]
    address: int = 0
    count: int = 0

    def wait(self, count: int, words: Sequence[tuple[int, int]], deadline_s: float) -> None:
        self.pause()


@dataclass(eq=False)
class _Paced:
    """An operation that pauses around whatever it does."""

    inner: Operation
    pause: Callable[[], None]

    @property
    def rounds(self) -> tuple[Round, ...]:
        return self.inner.rounds

    @property
    def description(self) -> str:
        return self.inner.description

    @property
    def lends(self) -> bool:
        return self.inner.lends

    def offer(self, number: int) -> torch.Tensor:
        self.pause()
        offered = self.inner.offer(number)
        self.pause()
        return offered

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        self.pause()
        self.inner.take(number, rank, tensor)

    def finish(self, number: int) -> None:
        self.pause()
        self.inner.finish(number)
        self.pause()


class Member:
    """The host of its executor, and the program that uses it."""

    def __init__(self, play: Play, name: str) -> None:
        self.play, self.name, self.generation = play, name, 0
        self.player = Player(self._live)
        self.alarm: Any = _Bell(pause=self.player.pause)
        self._arena = torch.empty(_ARENA_BYTES, dtype=torch.uint8)
        self._used_bytes = 0
        self.letters: list[tuple[int, Callable[[], None]]] = []  # by the generation that they were sent in
        self.group = MemberList("group", name, [name])
        self.executor = SharedMemoryExecutor(self, name)
        self.executor.add(self.group, in_memory=True)
        self.under_way: tuple[int, int] | None = None

    # SharedHost

    def why_gone(self, member: str) -> MemberLost | None:
        self.player.pause()  # between a look in vain and what is made of it
        return None

    def is_linked(self, member: str) -> bool:
        return True  # segments are all there

    def is_ahead(self, member: str) -> bool:
        return self.play.members[member].generation > self.generation

    def place(self, tensor: torch.Tensor) -> Location | None:
        at = tensor.data_ptr() - self._arena.data_ptr()
        return Location(segment=1, offset_bytes=at) if 0 <= at < _ARENA_BYTES else None

    def segment(self, member: str, number: int) -> torch.Tensor:
        return self.play.members[member]._arena

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        start = self._used_bytes
        self._used_bytes += -(-numel * dtype.itemsize // 64) * 64
        return self._arena[start : start + numel * dtype.itemsize].view(dtype)

    empty = scratch  # of fresh memory, which is zero

    def show_rings(self, group: int, members: tuple[str, ...], rings: torch.Tensor) -> None:
        for member in members:
            other = self.play.members[member]
            other.letters.append(
                (self.generation, lambda other=other: other.executor.hear_rings(group, self.name, rings))
            )

    def fail(self, ended: Callable[[], CommError | None], error: CommError) -> CommError:
        if ended() is None:
            self.executor.end(error)
            for other in self.play.members.values():
                word = Aborted(f"{error} (told by {self.name})")
                other.letters.append((self.generation, lambda other=other, word=word: other.executor.end(word)))
        return ended() or error

    # Its communicator's thread: done between two steps of the player

    def hear(self) -> None:
        """The oldest letter that is not of a newer generation."""
        due = next((letter for letter in self.letters if letter[0] <= self.generation), None)
        if due is not None:
            self.letters.remove(due)
            if due[0] == self.generation:
                due[1]()

    def edit(self) -> None:
        if self.generation + 1 >= len(self.play.acts) or self.name not in self.play.acts[self.generation + 1].view:
            return
        self.generation += 1
        act = self.play.acts[self.generation]
        self.executor.end(Aborted(f"the view changed to generation {self.generation}"))
        self.group.members = tuple(act.group)
        self.executor.renew(self.generation, tuple(act.view), lambda _group: True)

    # Its program

    def _live(self) -> None:
        while True:
            now = self.generation
            self._use(now)
            self.player.pause()
            if self.generation == now:
                self.edit()
            if self.generation == now:
                return  # the last act, or the last one that it is in

    def _use(self, generation: int) -> None:
        act = self.play.acts[generation]
        for index, kind in enumerate(act.kinds if self.name in act.group else ()):
            self.player.pause()
            if self.generation != generation or not self._operate(generation, index, kind):
                return

    def _operate(self, generation: int, index: int, kind: str) -> bool:
        place = (generation, index)
        value = float(self.play.value(self.name, place))
        lends = kind == "lent" or (kind == "mixed" and self.group.rank == 1)
        tensor = self.scratch(NUMEL, torch.float32) if lends else torch.empty(NUMEL)
        tensor.fill_(value)
        request = OperationRequest(
            work=Work(),
            make=lambda participant: self._make(participant, kind, tensor, place),
            deadline_s=time.monotonic() + 600,
            timeout_s=600,
            barrier=kind == "barrier",
        )
        self.under_way = None
        assert self.executor.submit(self.group, request, inline=True)
        error = request.work.error if request.work.done else AssertionError("not executed in this thread")
        if error is None:
            self.play.complete(self.name, place, kind, tensor)
        elif self.under_way == place:
            self.play.give_up(self.name, place, kind, error)
        tensor.fill_(float("nan"))  # its caller may do that from now on
        return error is None

    def _make(self, participant: Participant, kind: str, tensor: torch.Tensor, place: tuple[int, int]) -> Operation:
        self.under_way = place
        words = f"{kind} {place}"
        if kind == "barrier":
            inner = calls.barrier(participant, words)
        elif kind == "broadcast":
            inner = calls.broadcast(participant, tensor, 0)
        elif kind == "small":
            inner = calls.all_reduce(participant, tensor, "sum")
        else:
            inner = PulledReduce(participant, words, tensor, "sum")
        return _Paced(inner, self.player.pause)


@dataclass(kw_only=True)
class Play:
    """Acts in order, number 0 without a view. `complete` and `give_up` are where members are found wrong."""

    acts: tuple[Act, ...]
    members: dict[str, Member] = field(default_factory=dict)
    completed: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    went_on: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)  # who was given up for that, by whom

    def value(self, name: str, place: tuple[int, int]) -> int:
        return 1 << ("abcd".index(name) * 5) | place[0] << 20 | place[1] << 22

    def complete(self, name: str, place: tuple[int, int], kind: str, tensor: torch.Tensor) -> None:
        group = self.acts[place[0]].group
        values = [self.value(member, place) for member in group]
        expected = {"barrier": self.value(name, place), "broadcast": values[0]}.get(kind, sum(values))
        assert bool((tensor == expected).all()), f"{name} completed {kind} {place} with {tensor[0]}, not {expected}"
        self.completed.setdefault(place, set()).add(name)
        waiting = self.went_on.get(place, {}).get(name)
        assert waiting is None, f"{waiting} gave {kind} {place} up for {name}, which completed it"

    def give_up(self, name: str, place: tuple[int, int], kind: str, error: BaseException) -> None:
        assert isinstance(error, CommError)
        for other in self.members:
            if str(error).endswith(f"{other!r} went on to a newer view"):
                self.went_on.setdefault(place, {})[other] = name
        if name in self.acts[-1].view and kind != "broadcast":  # its root needs nobody
            others = self.completed.get(place, set())
            assert not others, f"{name} gave {kind} {place} up ({error}) when {others} had completed it"

    def run(self, *, paces: dict[str, int], edits: int, generator: random.Random) -> None:
        """`paces`: how often a member's program is next; `edits`: how often it is told of the next view in between."""
        for name in sorted({name for act in self.acts for name in act.view}):
            self.members[name] = Member(self, name)
        try:
            self._run(list(self.members.values()), paces, edits, generator)
        finally:
            for member in self.members.values():
                member.player.end()
                member.executor.close()

    def _run(self, members: list[Member], paces: dict[str, int], edits: int, generator: random.Random) -> None:
        weights = [weight for member in members for weight in (20 * paces[member.name], 10 * paces[member.name], edits)]
        for number in generator.choices(range(len(weights)), weights, k=_STEPS):
            member = members[number // 3]
            if not member.player.done:
                (member.player.step, member.hear, member.edit)[number % 3]()
        for turn in itertools.count():
            waiting = [member for member in members if not member.player.done]
            if not waiting:
                break
            assert turn < _TURNS_MAX, f"{[member.name for member in waiting]} wait for ever"
            for member in waiting:
                member.hear()
                if not member.player.done:
                    member.player.step()
        last = len(self.acts) - 1
        for index in range(len(self.acts[last].kinds)):
            assert self.completed.get((last, index)) == set(self.acts[last].group)
