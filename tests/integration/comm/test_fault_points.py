"""A member is stopped, or all its connections are reset, in every phase of every collective: no result is wrong, nobody
waits beyond the deadline, and the others go on without it. Kills are in `test_kill_points`.

One set of processes serves all cases of a test: after each one the victim takes part again as a new member.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import socket
import struct
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest

from elastrain.comm.shm.liveness import Beacon
from elastrain.comm.shm.shared_memory import libc
from elastrain.comm.wire.mesh import Mesh
from tests.support import comm_member
from tests.support.comm_points import COLLECTIVES, WRONG, Fuse, run
from tests.support.comm_processes import Child, Wire
from tests.support.comm_tools import Transport

Fault = Literal["stop", "reset"]
STOPPED_S = 0.15  # how long a collective may take while somebody is stopped
PATIENT_S = 20.0
POINTS: dict[Fault, int] = {"stop": 3, "reset": 8}


def _reset(mesh: Mesh) -> None:
    """Every connection of this process ends at once, with RST over TCP."""
    nowhere = ctypes.create_string_buffer(struct.pack("=H14x", socket.AF_UNSPEC))
    for link in list(mesh.links.by_member.values()):
        if link.stream is None:
            continue
        try:
            if link.same_host:
                link.stream.sock.shutdown(socket.SHUT_RDWR)
            else:
                libc.connect(link.stream.sock.fileno(), nowhere, 16)
        except OSError:
            pass  # the other thread has closed it meanwhile


def _limit(name: str | None) -> None:
    """Nothing more of one kind for this process, or (None) as much as it wants again."""
    if name == "RLIMIT_AS":  # room for what is small; a stage has 16 MiB
        wanted = 4096 * int(Path("/proc/self/statm").read_text().split()[0]) + (12 << 20)
    else:
        wanted = {"RLIMIT_NOFILE": 3, "RLIMIT_FSIZE": 1 << 20}.get(name or "", 0)
    for limit in ("RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_AS"):
        code = getattr(resource, limit)
        hard = resource.getrlimit(code)[1]
        resource.setrlimit(code, (wanted if limit == name else hard, hard))


class _Member:
    def __init__(self, wire: Wire, transport: Transport, fault: Fault) -> None:
        self.wire, self.transport, self.fault = wire, transport, fault
        self.beacon = Beacon()

    def serve(self, *, victim: bool) -> None:
        fuse = Fuse(self._fail) if victim else None
        while True:
            order, value = self.wire.hear()
            if order == "begin":
                self._begin(value)
            elif order == "edit":
                self.comm.world.timeout_s = PATIENT_S
                comm_member.edit(self.comm, *value)
                self.comm.world.barrier().wait()
                self.wire.say("edited")
            elif order == "limit":
                _limit(value)
                self.wire.say("limited")
            else:
                name, self.comm.world.timeout_s, calls = value
                if fuse is not None:
                    fuse.light(calls)
                said = run(name, self.comm.world)
                used = calls - fuse.left if fuse is not None else 0
                if fuse is not None:
                    fuse.light(0)
                self.wire.say([said, used, f"{type(self.comm.error).__name__}: {self.comm.error}"])

    def _begin(self, name: str) -> None:
        if hasattr(self, "comm"):
            self.comm.close()
        self.mesh, self.comm = comm_member.enter(
            self.wire, name, self.transport, timeout_s=PATIENT_S, beacon=self.beacon, segment_bytes=4 << 20
        )

    def _fail(self) -> None:
        if self.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            _reset(self.mesh)


class _Troupe:
    """Survivors a and b, and the victim, whose name changes."""

    def __init__(self, stack: ExitStack, transport: Transport, fault: Fault) -> None:
        self.fault: Fault = fault
        self.generation = self.victims = 0
        self.errors: list[str] = []  # of those who ran last
        self.peers: dict[str, Any] = {}
        self.children = [
            stack.enter_context(Child(lambda wire, v=victim: _Member(wire, transport, fault).serve(victim=v)))
            for victim in (False, False, True)
        ]
        self._begin("a", self.children[0])
        self._begin("b", self.children[1])

    def _begin(self, name: str, child: Child) -> None:
        child.wire.say(["begin", name])
        self.peers[name] = child.wire.hear()

    def take_in_victim(self) -> str:
        self.victims += 1
        victim = f"v{self.victims}"
        self._begin(victim, self.children[2])
        members = ["a", "b"]
        members.insert(self.victims % 3, victim)  # it is now rank 0, now the last
        self.edit(members, self.children)
        return victim

    def edit(self, members: list[str], children: list[Child]) -> None:
        self.generation += 1
        for child in children:
            child.wire.say(["edit", [self.generation, [self.peers[name] for name in members]]])
        assert [child.wire.hear() for child in children] == ["edited"] * len(children)

    def run(self, name: str, children: list[Child], timeout_s: float, calls: int) -> list[str]:
        """What the survivors say."""
        for child in children:
            child.wire.say(["run", [name, timeout_s, calls]])
        heard = [child.wire.hear() for child in children[:2]]
        self.errors = [error for _, _, error in heard]
        return [str(said) for said, _, _ in heard]

    def calls_of(self, name: str) -> int:
        """Inside the communicator, of an undisturbed victim."""
        self.take_in_victim()
        assert self.run(name, self.children, PATIENT_S, 1 << 60) == ["", ""]
        said, used, _ = self.children[2].wire.hear()
        assert said == ""
        return int(used)

    def hear_victim(self) -> str:
        """It may have been stopped, or be about to be."""
        child, deadline_s = self.children[2], time.monotonic() + PATIENT_S
        while True:
            os.kill(child.pid, signal.SIGCONT)
            if select.select([child.wire.sock], [], [], 0.05)[0]:
                said, _, error = child.wire.hear()
                self.errors.append(error)
                return str(said)
            assert time.monotonic() < deadline_s, "the victim hangs"

    def check(self, name: str, calls: int) -> None:
        victim, survivors = self.take_in_victim(), self.children[:2]
        began_s = time.monotonic()
        said = self.run(name, self.children, STOPPED_S if self.fault == "stop" else PATIENT_S, calls)
        assert time.monotonic() - began_s < PATIENT_S, f"{self.fault} at call {calls}: known late"
        assert WRONG not in said, f"{self.fault} at call {calls}: {said}"
        if self.fault == "reset":
            # The victim may have told one that it lost the other. Nobody waited until the deadline.
            assert all(words in ("", victim, "a", "b") for words in said), f"reset at call {calls}: {said}"
        self.edit(["a", "b"], survivors)
        assert self.run(name, survivors, PATIENT_S, 0) == ["", ""], f"after a {self.fault} at call {calls}"
        assert self.hear_victim() != WRONG, f"the victim of a {self.fault} at call {calls}"


@pytest.mark.parametrize(
    ("fault", "transport"), [("stop", "unix"), ("stop", "tcp"), ("reset", "unix"), ("reset", "tcp")]
)
@pytest.mark.parametrize("more", [1, pytest.param(20, marks=[pytest.mark.on_demand, pytest.mark.timeout(900)])])
def test_a_fault_anywhere_gives_right_results_or_an_error_in_time_and_the_others_go_on(
    fault: Fault, transport: Transport, more: int
) -> None:
    with ExitStack() as stack:
        troupe = _Troupe(stack, transport, fault)
        for name in COLLECTIVES:
            calls, points = troupe.calls_of(name), POINTS[fault] * more
            for point in range(points):
                troupe.check(name, 1 + point * calls // points)


@pytest.mark.parametrize("limit", ["RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_AS"])
def test_a_member_at_a_limit_of_its_system_says_which_and_the_others_go_on(limit: str) -> None:
    with ExitStack() as stack:
        troupe = _Troupe(stack, "unix", "stop")
        troupe.take_in_victim()
        poor = troupe.children[2]
        poor.wire.say(["limit", limit])
        assert poor.wire.hear() == "limited"
        said = troupe.run("all_reduce", troupe.children, PATIENT_S, 0)  # needs memory that the first one takes
        assert WRONG not in [*said, troupe.hear_victim()]
        assert any(limit in words for words in troupe.errors), troupe.errors
        assert not any(words.startswith(("NoneType", "Timeout")) for words in troupe.errors), troupe.errors
        poor.wire.say(["limit", None])
        assert poor.wire.hear() == "limited"
        troupe.edit(["a", "b"], troupe.children[:2])
        troupe.take_in_victim()
        assert troupe.run("all_reduce", troupe.children, PATIENT_S, 0) == ["", ""]
        assert troupe.hear_victim() == ""
