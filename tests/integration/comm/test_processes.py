"""The mesh between real processes: kills, stops, forks, and what is left afterwards."""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import signal
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import pytest
import torch

from elastrain.comm.shm.liveness import Beacon
from elastrain.comm.wire.addresses import Frame, MeshConfig, Newer, Peer, PeerLost
from elastrain.comm.wire.mesh import Mesh
from tests.support.comm_processes import Child, Wire
from tests.support.comm_tools import DEADLINE_S, SECRET, Transport

both = pytest.mark.parametrize("transport", ["unix", "tcp"])


def _mesh(name: str, transport: Transport, beacon: Beacon | None) -> Mesh:
    node = "here" if transport == "unix" else name
    return Mesh(me=name, node=node, job="job", secret=SECRET, config=MeshConfig(transport=transport), beacon=beacon)


def _peers(mesh: Mesh, wire: Wire) -> list[Peer]:
    """Tell the other end where I am, and learn where it is."""
    wire.say({"id": mesh.me, "node": mesh.node, "address": mesh.address})
    return [Peer(id=mesh.me, node=mesh.node, address=mesh.address), Peer(**wire.hear())]


def _child(
    transport: Transport, act: Callable[[Mesh, Wire], None], *, with_beacon: bool = True
) -> Callable[[Wire], None]:
    def body(wire: Wire) -> None:
        mesh = _mesh("b", transport, Beacon() if with_beacon else None)
        mesh.edit(1, _peers(mesh, wire))
        until(mesh, lambda events: any(isinstance(e, Frame) and e.body == b"hello" for e in events))
        wire.say("linked")
        wire.hear()
        act(mesh, wire)

    return body


def until(mesh: Mesh, claim: Callable[[list[Frame | PeerLost | Newer]], bool]) -> list[Frame | PeerLost | Newer]:
    """Poll until the claim holds of everything that came; returns that."""
    events: list[Frame | PeerLost | Newer] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while not claim(events):
        assert time.monotonic() < deadline_s, events
        events += mesh.poll(deadline_s - time.monotonic())
    return events


def poll_for_ever(mesh: Mesh, _wire: Wire) -> None:
    while True:
        mesh.poll(None)


@contextmanager
def pair(
    transport: Transport, act: Callable[[Mesh, Wire], None], *, with_beacon: bool = True
) -> Iterator[tuple[Mesh, Child]]:
    """A mesh "a" here, linked to "b" in a child that then acts."""
    with Child(_child(transport, act, with_beacon=with_beacon)) as child:
        mesh = _mesh("a", transport, None)
        mesh.edit(1, _peers(mesh, child.wire))
        mesh.send("b", 1, b"hello")
        link = mesh.links.by_member["b"]
        awaits_beacon = with_beacon and transport == "unix"
        while link.stream is None or link.outbox or (awaits_beacon and link._watcher is None):
            assert mesh.poll(DEADLINE_S) == []
        assert child.wire.hear() == "linked"
        child.wire.say("act")
        yield mesh, child
        mesh.close()


def is_lost(events: list[Frame | PeerLost | Newer]) -> bool:
    return any(isinstance(event, PeerLost) for event in events)


def _with_ballast(mesh: Mesh, wire: Wire) -> None:
    ballast = torch.ones(64 << 18)  # 64 MiB to be unmapped before sockets close
    wire.say("ready")
    poll_for_ever(mesh, wire)
    del ballast


@both
def test_a_kill_is_known_within_milliseconds(
    transport: Transport, record_property: Callable[[str, object], None]
) -> None:
    known_s, returned_s, reasons = [], [], []
    for _ in range(7):
        with pair(transport, _with_ballast) as (mesh, child):
            child.wire.hear()
            killed_s = time.monotonic()
            child.kill()
            (lost,) = until(mesh, is_lost)
            returned_s.append(time.monotonic() - killed_s)
            assert isinstance(lost, PeerLost) and lost.member == "b"
            known_s.append(lost.at_s - killed_s)
            reasons.append(lost.reason)
    median_ms, worst_ms = statistics.median(returned_s) * 1e3, max(returned_s) * 1e3
    record_property(
        "figures",
        f"{transport}: SIGKILL -> PeerLost out of poll: median {median_ms:.2f} ms, worst {worst_ms:.2f} ms"
        f" (known after {statistics.median(known_s) * 1e3:.2f} ms)",
    )
    if transport == "unix":
        # On a busy machine the socket may be noticed first.
        assert "its process ended" in reasons
        assert statistics.median(returned_s) < 0.5


def _send_and_wait(mesh: Mesh, wire: Wire) -> None:
    tensor = mesh.memory.empty(1000, torch.float32)
    tensor.fill_(7)
    for number in range(20):
        mesh.send("a", number, b"x" * 100, [tensor, torch.ones(5)])
    wire.say("sent")
    poll_for_ever(mesh, wire)


@both
def test_frames_that_arrived_before_the_kill_come_before_lost(transport: Transport) -> None:
    with pair(transport, _send_and_wait) as (mesh, child):
        assert child.wire.hear() == "sent"
        child.kill()
        child.join()
        events = until(mesh, is_lost)
        assert [event.kind for event in events if isinstance(event, Frame)] == list(range(20))
        assert isinstance(events[-1], PeerLost)
        mesh.edit(2, [Peer(id="a", node=mesh.node, address=mesh.address)])
        # The dead member's memory lives as long as somebody refers to it.
        for event in events[:-1]:
            assert isinstance(event, Frame) and torch.equal(event.tensors[0], torch.full((1000,), 7.0))


def _send_half(mesh: Mesh, wire: Wire) -> None:
    mesh.send("a", 1, b"", [torch.ones(50_000_000)])
    wire.say("sending")
    poll_for_ever(mesh, wire)


@both
def test_half_a_frame_is_no_frame(transport: Transport) -> None:
    with pair(transport, _send_half) as (mesh, child):
        child.wire.hear()
        for _ in range(3):
            mesh.poll(0.05)
        child.kill()
        assert [type(event) for event in until(mesh, is_lost)] == [PeerLost]


def _fork_a_loader(mesh: Mesh, wire: Wire) -> None:
    reader, _writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reader, 1)  # for ever: it holds the writer itself
    wire.say(pid)
    poll_for_ever(mesh, wire)


@both
def test_a_loader_forked_by_the_dead_does_not_keep_its_links_open(transport: Transport) -> None:
    with pair(transport, _fork_a_loader, with_beacon=False) as (mesh, child):
        loader = child.wire.hear()
        killed_s = time.monotonic()
        child.kill()
        until(mesh, is_lost)
        assert time.monotonic() - killed_s < 10.0
        os.kill(loader, signal.SIGKILL)


def _open_files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            pass  # the descriptor of the listing itself
    return found


def _fork_and_list(mesh: Mesh, wire: Wire) -> None:
    tensor = mesh.memory.empty(1000, torch.float32)
    mesh.send("a", 1, tensors=[tensor])
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, json.dumps(_open_files()).encode())
        os._exit(0)
    wire.say([json.loads(os.read(reader, 10_000)), _open_files()])
    poll_for_ever(mesh, wire)


def test_a_forked_child_holds_nothing_of_the_mesh() -> None:
    before = Counter(_open_files())  # of other tests in this process, whose children inherit them
    with pair("unix", _fork_and_list) as (_mesh_a, child):
        theirs, parents = child.wire.hear()
        kinds = ("elastrain", "eventpoll", "eventfd")
        assert all(any(kind in name for name in parents) for kind in kinds)
        kept = Counter(theirs) - before
        assert not [name for name in kept if any(kind in name for kind in kinds)]
        sockets = [sum("socket" in name for name in names) for names in (parents, theirs)]
        assert sockets[0] - sockets[1] == 2  # the listener and the link


def test_a_stopped_member_is_not_lost_and_goes_on_when_continued() -> None:
    """Silence is not proof."""
    with pair("unix", poll_for_ever) as (mesh, child):
        os.kill(child.pid, signal.SIGSTOP)
        for _ in range(200):
            mesh.send("b", 1, b"x" * 10_000)
        assert not is_lost(mesh.poll(0.2))
        assert mesh.links.by_member["b"].outbox
        os.kill(child.pid, signal.SIGCONT)
        deadline_s = time.monotonic() + DEADLINE_S
        while mesh.links.by_member["b"].outbox:
            assert time.monotonic() < deadline_s
            assert not is_lost(mesh.poll(0.1))


def _leave(mesh: Mesh, _wire: Wire) -> None:
    mesh.close()


@both
def test_a_member_that_leaves_says_so(transport: Transport) -> None:
    with pair(transport, _leave) as (mesh, child):
        assert child.join() == 0
        (lost,) = until(mesh, is_lost)
        assert isinstance(lost, PeerLost) and lost.reason in ("it left", "its process ended")


def _tell_address_and_wait(mesh: Mesh, wire: Wire) -> None:
    wire.say(mesh.address)
    poll_for_ever(mesh, wire)


def test_a_kill_leaves_nothing_behind() -> None:
    """Other processes of the machine may come and go meanwhile: only the names of these two count."""

    def names() -> set[str]:
        with open("/proc/net/unix") as table:
            return {line.split()[-1].removeprefix("@") for line in table if "@elastrain-" in line}

    with pair("unix", _tell_address_and_wait) as (mesh, child):
        ours = {re.search(r"elastrain-[0-9a-f]+", address)[0] for address in (mesh.address, child.wire.hear())}  # type: ignore[index]
        assert len(ours & names()) == 2
        child.kill()
        child.join()
    assert not ours & names()
    assert not [name for name in os.listdir("/dev/shm") if "elastrain" in name or str(child.pid) in name]


def _run_out_of_descriptors(wire: Wire) -> None:
    mesh = _mesh("a", "unix", None)
    where = "\0" + mesh.address.partition(":")[2]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    callers = [socket.socket(socket.AF_UNIX) for _ in range(20)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, hard))
    for caller in callers:
        caller.connect(where)
    before_s, rounds = time.monotonic(), 0
    while time.monotonic() < before_s + 0.5:
        mesh.poll(0.5)
        rounds += 1
    wire.say(rounds)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    while mesh._connections.opener._connector.under_way < len(callers):
        mesh.poll(1)
    wire.say("all are let in")


def test_a_process_without_free_descriptors_neither_spins_nor_forgets_who_waits() -> None:
    with Child(_run_out_of_descriptors) as child:
        assert child.wire.hear() < 30
        assert child.wire.hear() == "all are let in"


class _Garbage:
    """In a cycle with itself, as a connection to etcd and its threads' closures are."""

    def __init__(self, writer: int) -> None:
        self.writer, self.me = writer, self

    def __del__(self) -> None:
        os.write(self.writer, b"%d\n" % os.getpid())


def test_a_forked_child_leaves_the_garbage_of_its_parent_alone() -> None:
    """What closes connections of the parent's, in a child without the threads that serve them, ends the child."""
    reader, writer = os.pipe()
    gc.disable()
    try:
        _Garbage(writer)
        with Child(lambda _wire: gc.collect() and None) as child:
            assert child.join() == 0
    finally:
        gc.enable()
    gc.collect()
    assert os.read(reader, 100) == b"%d\n" % os.getpid()
    os.close(reader)
    os.close(writer)


def test_a_forked_child_does_not_start_the_threads_of_its_parents_connections() -> None:
    """Threads of gRPC that begin anew in a child wait for others that are not there, and abort the process."""
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        channel.subscribe(lambda _state: None, try_to_connect=True)
        for _ in range(10):
            with Child(lambda wire: wire.say(_threads_soon())) as child:
                assert child.wire.hear() == 1


def _threads_soon() -> int:
    time.sleep(0.02)
    return len(os.listdir("/proc/self/task"))
