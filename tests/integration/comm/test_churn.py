"""Members die and come at random while collectives run on overlapping groups; every finished result is checked."""

from __future__ import annotations

import itertools
import os
import random
import select
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
import torch

from elastrain.comm.errors import CommError, MemberLost
from tests.support import comm_member
from tests.support.comm_processes import Child, Wire
from tests.support.comm_tools import Transport

GROUPS = ("left", "right", "cross")
NUMELS = {"world": 50_000, "left": 10, "right": 20_000, "cross": 3_000}  # both algorithms, streams and shared memory
ANCHOR = "m1"  # never killed: its descriptors, threads and memory are watched
_PROMPT_S = 15.0  # a loss is known within milliseconds; processes on a crowded machine may have to wait for a turn
_VIEWS_MIN = 10


def _value(name: str, count: int) -> float:
    """What a member puts into its reduction number `count`; sums of a few are exact in float32."""
    return float(int(name[1:]) * 64 + count % 64)


class _Member:
    """A process: reduces on all of its groups until it is told of another view, or somebody is lost."""

    def __init__(self, wire: Wire, name: str, transport: Transport) -> None:
        self.name, self.wire = name, wire
        _, self.comm = comm_member.enter(wire, name, transport, segment_bytes=4 << 20, connect_timeout_s=5)
        self.groups = {"world": self.comm.world} | {group: self.comm.group(group, [name]) for group in GROUPS}
        self.tensors = {group: self.comm.empty(numel, torch.float32) for group, numel in NUMELS.items()}
        self.checked = self.generation = 0

    def serve(self) -> None:
        going, count = False, 0
        while True:
            if not going or select.select([self.wire.sock], [], [], 0)[0]:
                order, *values = self.wire.hear()
                if order == "end":
                    self.wire.say(["ended", self.generation, self.checked])
                    self.comm.close()
                    return
                self._edit(*values)
                going, count = True, 0
            try:
                self._round(count)
            except CommError as error:
                for tensor in self.tensors.values():
                    tensor.fill_(float("nan"))  # whoever still reads it must not take it for a result
                lost = error.member if isinstance(error, MemberLost) else ""
                self.wire.say(["failed", self.generation, lost, str(error)])
                going = False
                continue
            if count == 0:
                self.wire.say(["went", self.generation, *_resources()])
            count += 1

    def _edit(self, generation: int, peers: list[dict[str, str]], lists: dict[str, list[str]]) -> None:
        self.generation = generation
        comm_member.edit(self.comm, generation, peers, lists)

    def _round(self, count: int) -> None:
        mine = {name: group for name, group in self.groups.items() if self.name in group.members}
        for name in mine:
            self.tensors[name].fill_(_value(self.name, count))
        works = [group.all_reduce(self.tensors[name]) for name, group in mine.items()]
        for work, (name, group) in zip(works, mine.items(), strict=True):
            work.wait()
            wanted = sum(_value(member, count) for member in group.members)
            assert bool((self.tensors[name] == wanted).all()), f"{name} of {group.members}: not {wanted} everywhere"
            self.checked += 1


def _resources() -> list[int]:
    """Descriptors, threads, private memory in KiB of this process."""
    with open("/proc/self/smaps_rollup") as rollup:
        # Not Private_Dirty: shared memory counts there too while nobody else happens to map it.
        private = sum(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), private]


@dataclass(kw_only=True)
class _Driver:
    """Decides on views, as a launcher would, and kills and starts members."""

    transport: Transport
    generator: random.Random
    stack: ExitStack
    children: dict[str, Child] = field(default_factory=dict)  # who is alive
    peers: dict[str, dict[str, str]] = field(default_factory=dict)
    generation: int = 0
    killed_s: float = 0.0
    names: Any = field(default_factory=lambda: itertools.count(1))
    resources: list[list[int]] = field(default_factory=list)  # the anchor's, in views of two
    prompt_s: list[float] = field(default_factory=list)

    def start(self) -> str:
        name = f"m{next(self.names)}"
        self.children[name] = self.stack.enter_context(Child(lambda wire: _Member(wire, name, self.transport).serve()))
        self.peers[name] = self.children[name].wire.hear()
        return name

    def kill(self, count: int, spared: str = ANCHOR) -> list[str]:
        victims = self.generator.sample([name for name in self.children if name not in (ANCHOR, spared)], count)
        self.killed_s = time.monotonic()
        for name in victims:
            child = self.children.pop(name)
            child.kill()
            assert child.join() == -signal.SIGKILL
            child.wire.sock.close()
        return victims

    def tell(self, members: list[str], hearers: list[str]) -> None:
        lists = {group: self.generator.sample(members, (len(members) + 2) // 2) for group in GROUPS}
        for name in hearers:
            self.children[name].wire.say(["edit", self.generation, [self.peers[m] for m in members], lists])

    def edit(self) -> None:
        """A view of all who are alive, in any order; it must work for everybody."""
        self.generation += 1
        members = self.generator.sample(list(self.children), len(self.children))
        self.tell(members, members)
        for name in members:
            said = self.hear(name)
            assert said[0] == "went", f"{name} in an undisturbed view {members}: {said}"
            if name == ANCHOR and len(members) == 2:
                self.resources.append(said[2:])

    def hear(self, name: str) -> list[Any]:
        """What a member says of the current view; views before are over."""
        while True:
            said: list[Any] = self.children[name].wire.hear()
            if said[1] == self.generation:
                return said

    def await_losses(self, victims: list[str]) -> None:
        for name in self.children:
            said = self.hear(name)
            assert said[0] == "failed" and said[2] in victims, f"{name} after the loss of {victims}: {said}"
        self.prompt_s.append(time.monotonic() - self.killed_s)

    def rest(self) -> None:
        """A moment in the middle of the work."""
        select.select([], [], [], self.generator.random() * 0.02)

    def lose_some(self) -> None:
        self.rest()
        self.await_losses(self.kill(self.generator.randint(1, min(3, len(self.children) - 2))))
        self.edit()

    def take_some_in(self) -> None:
        for _ in range(self.generator.randint(1, 3)):
            self.start()
        self.rest()
        self.edit()

    def join_during_a_loss(self) -> None:
        newcomer = self.start()
        self.kill(1, spared=newcomer)
        old = [name for name in self.children if name != newcomer]
        assert all(self.hear(name)[0] == "failed" for name in old)
        self.edit()

    def lose_during_an_edit(self) -> None:
        """Some have heard of the new view, and one of it dies before it has."""
        self.generation += 1
        members = list(self.children)
        hearers = [name for name in members if self.generator.random() < 0.5]
        self.tell(members, hearers)
        self.kill(1)
        self.edit()

    def shrink_to_two(self) -> None:
        victims = self.kill(len(self.children) - 2)
        self.await_losses(victims)
        self.edit()


def _churn(transport: Transport, seconds: float, seed: int) -> tuple[_Driver, int]:
    with ExitStack() as stack:
        driver = _Driver(transport=transport, generator=random.Random(seed), stack=stack)
        for _ in range(4):
            driver.start()
        driver.edit()
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s or driver.generation < _VIEWS_MIN:
            driver.generator.choice(_acts(driver))()
        driver.shrink_to_two() if len(driver.children) > 2 else driver.edit()
        for child in driver.children.values():
            child.wire.say(["end"])
        checked = {name: _hear_end(driver, name) for name in driver.children}
        assert [child.join() for child in driver.children.values()] == [0, 0]
        return driver, checked[ANCHOR]


def _hear_end(driver: _Driver, name: str) -> int:
    """How many results it has checked. Whoever leaves first is missed by the other, which is right."""
    said = driver.hear(name)
    return int((said if said[0] == "ended" else driver.hear(name))[2])


def _acts(driver: _Driver) -> list[Callable[[], None]]:
    size = len(driver.children)
    if size == 2:
        return [driver.take_some_in]
    acts = [driver.lose_some, driver.join_during_a_loss, driver.lose_during_an_edit, driver.shrink_to_two]
    return acts + [driver.take_some_in] * 3 if size < 7 else acts


@pytest.mark.parametrize("transport", get_args(Transport))
@pytest.mark.parametrize(
    "seconds", [8, pytest.param(300, marks=[pytest.mark.on_demand, pytest.mark.timeout(900)])], ids="{}s".format
)
def test_members_die_and_come_and_no_result_is_wrong_no_waiter_hangs_and_nothing_leaks(
    transport: Transport, seconds: float, record_property: Callable[[str, object], None]
) -> None:
    driver, checked = _churn(transport, seconds, seed=int(os.environ.get("ELASTRAIN_CHURN_SEED", "1")))
    assert checked >= _VIEWS_MIN // 2  # one at least in each undisturbed view
    assert max(driver.prompt_s) < _PROMPT_S
    first, last = driver.resources[0], driver.resources[-1]
    assert last[:2] == first[:2], f"descriptors and threads: {driver.resources}"
    assert last[2] < first[2] + (16 << 10), f"private memory in KiB: {driver.resources}"
    record_property(
        "figures",
        f"{transport}: {driver.generation} views, {checked} results checked by one member,"
        f" a kill known to all within {max(driver.prompt_s) * 1e3:.0f} ms at worst; {first} -> {last}",
    )
