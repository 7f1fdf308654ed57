"""A member is killed at every point of every collective: whatever the others get is right, or says who is lost.

See `comm_points` for what a point is.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from typing import Any, get_args

import pytest

from tests.support import comm_member
from tests.support.comm_points import COLLECTIVES, Fuse, run
from tests.support.comm_processes import Child, Wire
from tests.support.comm_tools import Transport


class _Member:
    def __init__(self, wire: Wire, name: str, transport: Transport, *, victim: bool) -> None:
        self.fuse = Fuse(lambda: os.kill(os.getpid(), signal.SIGKILL)) if victim else None
        self.wire = wire
        _, self.comm = comm_member.enter(wire, name, transport, segment_bytes=4 << 20)

    def serve(self) -> None:
        while True:
            order, value = self.wire.hear()
            if order == "edit":
                comm_member.edit(self.comm, *value)
                self.comm.world.barrier().wait()
                self.wire.say("edited")
            elif order == "light":
                assert self.fuse is not None
                self.fuse.light(value)
            else:
                self.wire.say(run(value, self.comm.world))
                if self.fuse is not None:
                    self.fuse.light(0)


def _points(transport: Transport, name: str, step: int) -> int:
    """Kill victim after victim, each `step` calls later, until one comes through; returns how many were killed."""
    with ExitStack() as stack:
        peers: dict[str, Any] = {}
        children: dict[str, Child] = {}

        def start(member: str, *, victim: bool = False) -> None:
            child = Child(lambda wire: _Member(wire, member, transport, victim=victim).serve())
            children[member] = stack.enter_context(child)
            peers[member] = child.wire.hear()

        def edit(generation: int, members: list[str]) -> None:
            for member in members:
                children[member].wire.say(["edit", [generation, [peers[m] for m in members]]])
            assert [children[member].wire.hear() for member in members] == ["edited"] * len(members)

        start("a")
        start("b")
        for number in range(1000):
            victim = f"v{number}"
            start(victim, victim=True)
            members = ["a", "b"]
            members.insert(number % 3, victim)  # it is now rank 0, now the last
            edit(2 * number + 1, members)
            children[victim].wire.say(["light", number * step + 1])
            for member in members:
                children[member].wire.say(["run", name])
            said = [children[member].wire.hear() for member in "ab"]
            assert all(words in ("", victim) for words in said), f"killed at call {number * step + 1}: {said}"
            if _came_through(children[victim]):
                assert said == ["", ""]
                return number
            edit(2 * number + 2, ["a", "b"])
        raise AssertionError("the fuse never outlasts the collective")


def _came_through(victim: Child) -> bool:
    try:
        words = victim.wire.hear()
    except (EOFError, ConnectionResetError):
        assert victim.join() == -signal.SIGKILL
        return False
    assert words == ""
    return True


@pytest.mark.parametrize("transport", get_args(Transport))
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("step", [20, pytest.param(2, marks=[pytest.mark.on_demand, pytest.mark.timeout(900)])])
def test_a_kill_anywhere_gives_right_results_or_names_the_lost(transport: Transport, name: str, step: int) -> None:
    assert _points(transport, name, step) >= 2
