"""Collectives between real processes while members are killed, stopped and added."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from elastrain.comm.errors import CommError, MemberLost
from tests.support import comm_member
from tests.support.comm_processes import Child, Wire
from tests.support.comm_tools import Transport

both = pytest.mark.parametrize("transport", ["unix", "tcp"])
NUMEL = 200_000


def _value(name: str, count: int) -> float:
    """What member `name` puts into its all_reduce number `count`; exact in float32."""
    return float(sum(name.encode()) * 64 + count % 64)


class _Member:
    """A process's side: told by the test to reduce for ever, to edit, or to reduce once."""

    def __init__(self, wire: Wire, name: str, transport: Transport, timeout_s: float) -> None:
        self.name, self.wire = name, wire
        _, self.comm = comm_member.enter(wire, name, transport, timeout_s=timeout_s, segment_bytes=8 << 20)
        self.shared = self.comm.empty(NUMEL, torch.float32)
        self.ordinary = torch.empty(NUMEL)

    def serve(self) -> None:
        while True:
            order, value = self.wire.hear()
            if order == "edit":
                comm_member.edit(self.comm, *value)
                self.comm.world.barrier(timeout_s=20.0).wait()  # also where collectives have less
                self.wire.say(["edited", time.monotonic()])
            elif order == "reduce":
                self.wire.say(["ended", *self._reduce(value)])

    def _reduce(self, times: int) -> tuple[str, str, float, int]:
        """Reduce and check every result; returns error name, lost member or words, when, and how many went well."""
        members = self.comm.world.members
        done = 0
        try:
            while done < times:
                tensor = self.shared if done % 2 else self.ordinary
                tensor.fill_(_value(self.name, done))
                self.comm.world.all_reduce(tensor).wait()
                wanted = sum(_value(member, done) for member in members)
                assert bool((tensor == wanted).all()), f"{tensor} where {wanted} was expected"
                done += 1
        except CommError as error:
            self.shared.fill_(float("nan"))  # whoever still reads it must not take it for a result
            words = error.member if isinstance(error, MemberLost) else str(error)
            return type(error).__name__, words, time.monotonic(), done
        return "", "", time.monotonic(), done


class Troupe:
    """Member processes by name."""

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        self.transport, self.timeout_s = transport, timeout_s
        self.children: dict[str, Child] = {}
        self.peers: dict[str, dict[str, str]] = {}
        self.stack = ExitStack()

    def start(self, name: str) -> None:
        child = Child(lambda wire: _Member(wire, name, self.transport, self.timeout_s).serve())
        self.children[name] = self.stack.enter_context(child)
        self.peers[name] = child.wire.hear()

    def tell(self, order: str, value: Any, names: str) -> None:
        for name in names:
            self.children[name].wire.say([order, value])

    def hear(self, names: str) -> dict[str, list[Any]]:
        return {name: self.children[name].wire.hear() for name in names}

    def edit(self, generation: int, names: str) -> float:
        """Returns how long it took from telling the first member to the last one's barrier."""
        before_s = time.monotonic()
        self.tell("edit", [generation, [self.peers[name] for name in names]], names)
        return max(float(said[1]) for said in self.hear(names).values()) - before_s


@contextmanager
def troupe(transport: Transport, names: str, timeout_s: float = 20) -> Iterator[Troupe]:
    made = Troupe(transport, timeout_s)
    with made.stack:
        for name in names:
            made.start(name)
        made.edit(1, names)
        yield made


@both
def test_survivors_of_a_kill_in_a_collective_all_hear_of_it_and_go_on(
    transport: Transport, record_property: Callable[[str, object], None]
) -> None:
    known_s, edited_s = [], []
    generator = random.Random(1)
    with troupe(transport, "abcd") as made:
        generation, present = 1, "abcd"
        for newcomer in "efghi":
            made.tell("reduce", 10**9, present)
            victim = generator.choice(present)
            survivors = present.replace(victim, "")
            made.children[victim].wire.sock.settimeout(0.01 + generator.random() * 0.03)
            with pytest.raises(TimeoutError):  # a moment in the middle of the work
                made.children[victim].wire.hear()
            killed_s = time.monotonic()
            made.children[victim].kill()
            for said in made.hear(survivors).values():
                assert said[1:3] == ["MemberLost", victim]
                known_s.append(said[3] - killed_s)
            generation += 1
            edited_s.append(made.edit(generation, survivors))
            made.tell("reduce", 5, survivors)
            assert [said[1:3] for said in made.hear(survivors).values()] == [["", ""]] * 3
            made.start(newcomer)
            present = survivors + newcomer
            generation += 1
            made.edit(generation, present)
            made.tell("reduce", 5, present)
            assert [said[1:3] for said in made.hear(present).values()] == [["", ""]] * 4
    record_property(
        "figures",
        f"{transport}, 4 processes: SIGKILL in all_reduce -> waiter raises: median"
        f" {statistics.median(known_s) * 1e3:.1f} ms, worst {max(known_s) * 1e3:.1f} ms;"
        f" edit -> last survivor's barrier: median {statistics.median(edited_s) * 1e3:.1f} ms",
    )


@both
def test_two_members_lost_at_once(transport: Transport) -> None:
    with troupe(transport, "abcde") as made:
        made.tell("reduce", 10**9, "abcde")
        made.children["b"].kill()
        made.children["d"].kill()
        assert all(said[1] == "MemberLost" and said[2] in "bd" for said in made.hear("ace").values())
        made.edit(2, "ace")
        made.tell("reduce", 20, "ace")
        assert [said[1:3] for said in made.hear("ace").values()] == [["", ""]] * 3


@both
def test_a_loss_during_an_edit_leads_to_the_next_one(transport: Transport) -> None:
    with troupe(transport, "abcd") as made:
        made.tell("edit", [2, [made.peers[name] for name in "abc"]], "ab")  # c is killed before it hears of it
        made.children["c"].kill()
        for name in "ab":
            made.children[name].wire.sock.settimeout(30)
        # Their barrier in generation 2 fails: the processes end with that error, as nobody caught it there.
        for name in "ab":
            with pytest.raises(EOFError):
                made.children[name].wire.hear()
            assert made.children[name].join() == 1


@both
def test_a_stopped_member_ends_the_others_at_the_deadline_and_spoils_nothing_when_it_wakes(
    transport: Transport,
) -> None:
    with troupe(transport, "abc", timeout_s=2.0) as made:
        made.tell("reduce", 10**9, "abc")
        os.kill(made.children["c"].pid, signal.SIGSTOP)
        ends = {name: said[1:3] for name, said in made.hear("ab").items()}
        assert {end[0] for end in ends.values()} <= {"Timeout", "Aborted"}
        assert any(end[0] == "Timeout" and "c within 2.0 s" in end[1] for end in ends.values())
        made.edit(2, "ab")
        made.tell("reduce", 10**9, "ab")
        os.kill(made.children["c"].pid, signal.SIGCONT)
        said = made.children["c"].wire.hear()
        assert said[1] in ("MemberLost", "Timeout", "Aborted")
        made.children["a"].kill()
        assert made.hear("b")["b"][1:3] == ["MemberLost", "a"]
