"""A member is killed at every point of every collective: whatever the others get is right, or says who is lost.

A point is a call inside the communicator, counted in all threads of the victim: it does not matter how a collective is
carried out.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any, get_args

import pytest
import torch

from elastrain.comm.communicator import Communicator
from elastrain.comm.errors import CommError, MemberLost
from elastrain.comm.groups import Group
from elastrain.comm.liveness import Beacon
from elastrain.comm.mesh import Mesh, MeshConfig, Peer
from tests.contract.comm_tools import SECRET, Transport
from tests.integration.comm_processes import Child, Wire

NUMEL = 6000  # small enough to be quick, large enough for shared memory and for slices
Collective = Callable[[Group], list[tuple[torch.Tensor, torch.Tensor]]]  # what came, what is right


def _given(rank: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.full((numel,), float(rank + 1))


def _all_reduce(group: Group, numel: int = NUMEL) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tensor = _given(group.rank, numel)
    group.all_reduce(tensor).wait()
    return [(tensor, sum((_given(r, numel) for r in range(1, group.size)), _given(0, numel)))]


def _broadcast(group: Group) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tensor = _given(group.rank)
    group.broadcast(tensor, root=1).wait()
    return [(tensor, _given(1))]


def _all_gather(group: Group) -> list[tuple[torch.Tensor, torch.Tensor]]:
    outs = [torch.empty(NUMEL) for _ in range(group.size)]
    group.all_gather(outs, _given(group.rank)).wait()
    return [(out, _given(rank)) for rank, out in enumerate(outs)]


def _reduce_scatter(group: Group) -> list[tuple[torch.Tensor, torch.Tensor]]:
    out = torch.empty(NUMEL)
    group.reduce_scatter(out, [_given(group.rank)] * group.size).wait()
    return [(out, sum((_given(r) for r in range(1, group.size)), _given(0)))]


def _all_to_all(group: Group) -> list[tuple[torch.Tensor, torch.Tensor]]:
    outs = [torch.empty(NUMEL) for _ in range(group.size)]
    group.all_to_all(outs, [_given(10 * group.rank + to) for to in range(group.size)]).wait()
    return [(out, _given(10 * rank + group.rank)) for rank, out in enumerate(outs)]


def _to_one_and_back(group: Group) -> list[tuple[torch.Tensor, torch.Tensor]]:
    mine, out, reduced = _given(group.rank), torch.empty(NUMEL), _given(group.rank)
    outs = [torch.empty(NUMEL) for _ in range(group.size)] if group.rank == 0 else None
    group.gather(outs, mine).wait()
    group.scatter(out, outs).wait()
    group.reduce(reduced, root=0).wait()
    total = sum((_given(r) for r in range(1, group.size)), _given(0))
    return [(out, mine), *([(reduced, total)] if group.rank == 0 else [])]


def _ring(group: Group) -> list[tuple[torch.Tensor, torch.Tensor]]:
    left, out = (group.rank - 1) % group.size, torch.empty(NUMEL)
    group.send(_given(group.rank), (group.rank + 1) % group.size, tag=3)
    group.recv(out, left, tag=3).wait()
    return [(out, _given(left))]


def _barrier(group: Group) -> list[tuple[torch.Tensor, torch.Tensor]]:
    group.barrier().wait()
    return []


COLLECTIVES: dict[str, Collective] = {
    "barrier": _barrier,
    "all_reduce of few": lambda group: _all_reduce(group, 4),
    "all_reduce": lambda group: _all_reduce(group, 20_000),
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather, scatter, reduce": _to_one_and_back,
    "ring of messages": _ring,
}


class _Fuse:
    """Kills this process at a given call inside the communicator, counted from `light` on."""

    def __init__(self) -> None:
        self.left = 0
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def light(self, calls: int) -> None:
        self.left = calls

    def _on_event(self, frame: FrameType, event: str, _value: Any) -> None:
        if self.left and event == "call" and "/comm/" in frame.f_code.co_filename:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)


class _Member:
    def __init__(self, wire: Wire, name: str, transport: Transport, *, victim: bool) -> None:
        torch.set_num_threads(1)
        self.fuse = _Fuse() if victim else None
        node = "here" if transport == "unix" else name
        config = MeshConfig(transport=transport, segment_bytes=4 << 20)
        mesh = Mesh(me=name, node=node, job="points", secret=SECRET, config=config, beacon=Beacon())
        self.wire, self.comm = wire, Communicator(mesh, timeout_s=20)
        wire.say({"id": name, "node": node, "address": mesh.address})

    def serve(self) -> None:
        while True:
            order, value = self.wire.hear()
            if order == "edit":
                generation, peers = value
                self.comm.edit(generation, [Peer(**peer) for peer in peers])
                self.comm.world.barrier().wait()
                self.wire.say("edited")
            elif order == "light":
                assert self.fuse is not None
                self.fuse.light(value)
            else:
                self.wire.say(self._run(COLLECTIVES[value]))
                if self.fuse is not None:
                    self.fuse.light(0)

    def _run(self, collective: Collective) -> str:
        try:
            found = collective(self.comm.world)
        except MemberLost as error:
            return error.member
        except CommError as error:
            return f"{type(error).__name__}: {error}"
        return "" if all(torch.equal(came, right) for came, right in found) else "a wrong result"


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
@pytest.mark.parametrize("step", [20, pytest.param(2, marks=[pytest.mark.on_demand, pytest.mark.timeout(600)])])
def test_a_kill_anywhere_gives_right_results_or_names_the_lost(transport: Transport, name: str, step: int) -> None:
    assert _points(transport, name, step) >= 2
