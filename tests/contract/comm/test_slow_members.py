"""A member is stopped before it takes its result; the others have completed the collective, and go on without it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from elastrain.comm.collectives import calls
from elastrain.comm.collectives.algorithms import Round
from elastrain.comm.collectives.reducing import STAGE_BYTES, Operation, Participant
from elastrain.comm.errors import Aborted, MemberLost
from elastrain.comm.groups.communicator import Communicator, PendingEdit
from elastrain.comm.groups.group import Group
from elastrain.comm.wire.addresses import Peer
from tests.support.party import Party, party
from tests.support.waiting import until

SMALL, LARGE = 100, 60_000  # one round, and chunks
Make = Callable[[Participant, torch.Tensor], Operation]
KINDS: dict[str, tuple[Make, int]] = {
    "barrier": (lambda participant, tensor: calls.barrier(participant, "barrier"), SMALL),
    "broadcast": (lambda participant, tensor: calls.broadcast(participant, tensor, 0), SMALL),
    "small": (lambda participant, tensor: calls.all_reduce(participant, tensor, "sum"), SMALL),
    "large": (lambda participant, tensor: calls.all_reduce(participant, tensor, "sum"), LARGE),
    "lent": (lambda participant, tensor: calls.all_reduce(participant, tensor, "sum"), LARGE),
}


@dataclass(kw_only=True)
class _Slow:
    """An operation that stops before it looks at what came in the last round in which it awaits anything."""

    inner: Operation
    came: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

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
        return self.inner.offer(number)

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        if number == max(index for index, plan in enumerate(self.rounds) if plan.awaits):
            self.came.set()
            assert self.go.wait(20)
        self.inner.take(number, rank, tensor)

    def finish(self, number: int) -> None:
        self.inner.finish(number)


class _Stage:
    """a, b and c in one collective: a and b have completed it, c is stopped."""

    def __init__(self, made: Party, kind: str) -> None:
        self.made, self.kind = made, kind
        self.make, self.numel = KINDS[kind]
        names = list(made.comms)
        groups = made.each(lambda comm, rank: comm.group("all", names))
        self.groups: dict[str, Group] = dict(zip(names, groups, strict=True))
        made.each(lambda comm, rank: self.groups[names[rank]].barrier().wait())
        self.slow: list[_Slow] = []
        self.tensors = {name: self._tensor(comm, name) for name, comm in made.comms.items()}
        started = threading.Event()

        def make(participant: Participant) -> Operation:
            self.slow.append(_Slow(inner=self.make(participant, self.tensors["c"])))
            started.set()
            return self.slow[0]

        c = made.comms["c"]
        self.work = c.dispatcher.submit(self.groups["c"].list, make, 60, inline=False)
        assert made.each(self._use, "ab") == [None, None]
        assert started.wait(20)
        assert self.slow[0].came.wait(20)

    def _tensor(self, comm: Communicator, name: str) -> torch.Tensor:
        tensor = comm.empty(self.numel, torch.float32) if self.kind == "lent" else torch.empty(self.numel)
        return tensor.fill_(float(ord(name)))

    def _use(self, comm: Communicator, rank: int) -> None:
        tensor = self.tensors["ab"[rank]]
        group = self.groups["ab"[rank]].list
        comm.dispatcher.submit(group, lambda participant: self.make(participant, tensor), 60, inline=False).wait()
        self.check(tensor, "ab"[rank])
        tensor.fill_(float("nan"))  # its caller may do so

    def check(self, tensor: torch.Tensor, name: str) -> None:
        expected = {"barrier": ord(name), "broadcast": ord("a")}.get(self.kind, sum(map(ord, "abc")))
        assert bool((tensor == expected).all())

    def peers(self, names: str) -> list[Peer]:
        return [Peer(id=n, node=self.made.meshes[n].node, address=self.made.meshes[n].address) for n in names]

    def edit(self, name: str, generation: int, names: str = "abc", group: str = "abc") -> PendingEdit:
        lists = {"all": [member for member in group if member in names]}
        return self.made.comms[name].begin_edit(generation, self.peers(names), lists)

    def sum(self, names: str) -> list[Any]:
        """Of the group that consists of these by now: whatever was stopped has been written over."""
        return self.made.each(lambda comm, rank: self._sum(names, names[rank]), names)

    def _sum(self, names: str, name: str) -> None:
        tensor = torch.full((LARGE,), float(ord(name)))
        self.groups[name].all_reduce(tensor).wait()
        assert bool((tensor == sum(map(ord, names))).all())

    def let_go(self) -> None:
        self.slow[0].go.set()
        self.work.wait()
        self.check(self.tensors["c"], "c")


kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("edits", [1, 2, 3])
def test_a_collective_that_others_completed_completes_whatever_edits_follow(kind: str, edits: int) -> None:
    with party("unix", 3) as made:
        stage = _Stage(made, kind)
        for generation in range(2, 2 + edits):
            for name in "ab":
                stage.edit(name, generation).wait()
        until(lambda: made.comms["c"].newest_generation == 1 + edits)  # it was told
        stage.let_go()
        stage.edit("c", 1 + edits).wait()
        assert stage.sum("abc") == [None] * 3


@kinds
def test_it_completes_though_its_own_program_takes_over_the_new_views_meanwhile(kind: str) -> None:
    with party("unix", 3) as made:
        stage = _Stage(made, kind)
        for generation in (2, 3):
            for name in "abc":
                stage.edit(name, generation).work.wait()
        works = [stage.groups[name].barrier() for name in "ab"]  # they have to wait for c
        stage.let_go()
        works.append(stage.groups["c"].barrier())
        for work in works:
            work.wait()
        assert stage.sum("abc") == [None] * 3


def test_it_completes_though_the_memory_that_it_reads_comes_after_the_new_view() -> None:
    """The last parts lie in segments that c's thread has not come to read of when it takes over the view."""
    with party("unix", 3) as made:
        names, comms = list(made.comms), made.comms
        groups = dict(zip(names, made.each(lambda comm, rank: comm.group("all", names)), strict=True))
        made.each(lambda comm, rank: groups[names[rank]].barrier().wait())
        tensors = {name: comm.empty(LARGE, torch.float32).fill_(ord(name)) for name, comm in comms.items()}
        c = comms["c"]
        state = c._executors.shared._tracks[groups["c"].list.number].state
        state.stage = c.empty(STAGE_BYTES, torch.uint8)
        assert c._executors.host.place(state.stage) and c._executors.host.place(
            tensors["c"]
        )  # the others are told of them
        held, edit, looked = threading.Event(), threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            assert edit.wait(20)

        c._driver.post(hold)
        assert held.wait(20)
        works = {name: groups[name].all_reduce(tensor) for name, tensor in tensors.items()}
        for name in "ab":
            works[name].wait()
        peers = [Peer(id=n, node=made.meshes[n].node, address=made.meshes[n].address) for n in names]
        begun = c.begin_edit(2, peers)
        wait = c._executors.host.alarm.wait

        def sleep(*told: Any) -> None:
            looked.set()
            wait(*told)

        def look_first() -> None:
            """c's operation looks what has become of it before c's thread reads on."""
            c._executors.host.alarm.wait = sleep  # type: ignore[method-assign]
            c._executors.host.alarm.ring()
            until(lambda: looked.is_set() or works["c"].done)

        c._driver.post(look_first)
        edit.set()
        begun.wait()
        works["c"].wait()
        assert bool((tensors["c"] == sum(map(ord, names))).all())


@kinds
def test_an_edit_returns_when_no_collective_of_former_views_writes_into_a_tensor_any_more(kind: str) -> None:
    with party("unix", 3) as made:
        stage, seen = _Stage(made, kind), queue.Queue[bool]()
        for name in "ab":
            stage.edit(name, 2).wait()
        begun = stage.edit("c", 2)
        begun.work.wait()

        def await_edit() -> None:
            begun.wait()
            seen.put(stage.work.done)

        waiting = threading.Thread(target=await_edit)
        waiting.start()
        with pytest.raises(queue.Empty):
            seen.get(timeout=0.2)
        stage.let_go()
        waiting.join(20)
        assert seen.get_nowait()
        assert stage.sum("abc") == [None] * 3


@kinds
def test_it_completes_though_its_member_is_in_the_group_no_more(kind: str) -> None:
    with party("unix", 3) as made:
        stage = _Stage(made, kind)
        for name in "abc":
            stage.edit(name, 2, group="ab").work.wait()
        tensors = [torch.full((LARGE,), float(ord(name))) for name in "ab"]
        works = [stage.groups[name].all_reduce(tensor) for name, tensor in zip("ab", tensors, strict=True)]
        stage.let_go()
        for work in works:
            work.wait()
        assert [float(tensor[-1]) for tensor in tensors] == [sum(map(ord, "ab"))] * 2


@kinds
def test_it_completes_though_the_others_have_left(kind: str) -> None:
    with party("unix", 3) as made:
        stage = _Stage(made, kind)
        for name in "ab":
            made.comms.pop(name).close()
        stage.let_go()


@kinds
def test_who_was_removed_gets_an_error_rather_than_what_was_written_over(kind: str) -> None:
    with party("unix", 3) as made:
        stage = _Stage(made, kind)
        for name in "ab":
            stage.edit(name, 2, "ab").wait()
        assert stage.sum("ab") == [None] * 2
        stage.slow[0].go.set()
        with pytest.raises((Aborted, MemberLost)):
            stage.work.wait()


def test_what_has_not_begun_fails_when_the_view_changes() -> None:
    with party("unix", 3) as made:
        stage = _Stage(made, "small")
        queued = stage.groups["c"].barrier()
        for name in "abc":
            stage.edit(name, 2).work.wait()
        stage.let_go()
        with pytest.raises(Aborted, match="the view changed to generation 2"):
            queued.wait()
