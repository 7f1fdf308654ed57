"""Every listening socket of a job against every attack of who does not know the secret: nobody gets in, little is kept.

The doors: a member's mesh (UNIX, TCP), an agent's for its workers (UNIX), an agent's for other agents (TCP).
"""

from __future__ import annotations

import os
import random
import select
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from elastrain.base.event_loop import EventLoop
from elastrain.comm.errors import CommError
from elastrain.comm.wire.acceptor import Acceptor
from elastrain.comm.wire.addresses import MeshConfig, Peer
from elastrain.comm.wire.handshake import Handshake, Role
from elastrain.comm.wire.mesh import Mesh
from elastrain.comm.wire.secure import Connection
from elastrain.launcher.nodes.agent_links import listen
from elastrain.launcher.nodes.door import listen_abstract, open_door, workers_handshake

SECRET = b"s" * 32
WAIT_S = 20.0
SAID_BYTES_MOST = 1024  # to or from who is not proven


@dataclass(frozen=True, kw_only=True)
class Door:
    """`turn` lets its owner do what there is to do. `inside`: who has been let in."""

    connect: Callable[[], socket.socket]
    turn: Callable[[], None]
    inside: Callable[[], list[str]]
    unproven: Callable[[], int]


def _to(address: str) -> socket.socket:
    scheme, _, where = address.partition(":")
    if scheme == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect("\0" + where)
        return sock
    host, _, port = where.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


@contextmanager
def _mesh(transport: str) -> Iterator[Door]:
    # c never comes, and is not missed however long the strangers take on a busy machine.
    config = MeshConfig(transport=transport, connect_timeout_s=600.0)  # type: ignore[arg-type]
    mesh = Mesh(me="b", node="here", job="job", secret=SECRET, config=config)
    node = "here" if transport == "unix" else "there"
    mesh.edit(1, [Peer(id="b", node="here", address=mesh.address), Peer(id="c", node=node, address=mesh.address)])
    address = next(part for part in mesh.address.split(",") if part.startswith(transport))
    opener = mesh._connections.opener

    def turn() -> None:
        for event in mesh.poll(0.002):
            raise AssertionError(f"a stranger has brought about {event}")

    def inside() -> list[str]:
        return [link.peer.id for link in mesh.links if link.stream is not None] + list(opener._early)

    try:
        yield Door(
            connect=lambda: _to(address),
            turn=turn,
            inside=inside,
            unproven=lambda: opener._connector._acceptor.introductions,
        )
    finally:
        mesh.close()


@contextmanager
def _agent(listener: socket.socket, address: str, handshake: Callable[[], Handshake]) -> Iterator[Door]:
    loop, kept = EventLoop(), list[tuple[str, Connection]]()

    def admit(name: str, connection: Connection) -> None:
        kept.append((name, connection))

    made: Acceptor = open_door(loop, listener, handshake, admit, lambda reason: None)

    def turn() -> None:
        loop.turn(time.monotonic() + 0.002)
        made.on_tick(time.monotonic())

    try:
        yield Door(
            connect=lambda: _to(address),
            turn=turn,
            inside=lambda: [name for name, _ in kept],
            unproven=lambda: made.introductions,
        )
    finally:
        made.close()
        loop.close()
        for _, connection in kept:
            connection.close()


@contextmanager
def _worker_door() -> Iterator[Door]:
    name = f"elastrain-test/{os.getpid()}/{time.monotonic_ns()}"
    with _agent(listen_abstract(name), f"unix:{name}", lambda: workers_handshake(SECRET, "job")) as door:
        yield door


@contextmanager
def _agents_door() -> Iterator[Door]:
    listener = listen("127.0.0.1")
    address = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
    with _agent(listener, address, lambda: Handshake(Role.ACCEPT, secret=SECRET, job="job", me="agent of a")) as door:
        yield door


DOORS = {
    "a member's UNIX socket": partial(_mesh, "unix"),
    "a member's TCP port": partial(_mesh, "tcp"),
    "an agent's UNIX socket": _worker_door,
    "an agent's TCP port": _agents_door,
}


# -------------------------------------------------------------------------------------------------------------- attacks


class Stranger:
    """One connection, and what was said on it. `exchange` ends when the other end has closed it or is silent."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self.sock = door.connect()
        self.sock.setblocking(False)
        self.heard = b""
        self.closed = False

    def say(self, data: bytes) -> None:
        try:
            self.sock.send(data)
        except OSError:
            self.closed = True

    def listen(self, turns: int = 5) -> None:
        """For as many turns of the door as nothing comes."""
        quiet = 0
        while quiet < turns and not self.closed:
            self._door.turn()
            quiet += 1
            try:
                data = self.sock.recv(4096)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            self.closed, quiet = not data, 0
            self.heard += data

    def greet(self, hand: Handshake) -> None:
        """As far as the other end goes along."""
        while not self.closed and not hand.done:
            self.say(hand.bytes_to_send())
            before = len(self.heard)
            self.listen()
            new = self.heard[before:]
            if not new:
                return
            try:
                while new and not hand.done:
                    wanted = hand.wants()
                    hand.receive(new[:wanted])
                    new = new[wanted:]
            except CommError:
                self._prove_nevertheless(hand)
                return

    def _prove_nevertheless(self, hand: Handshake) -> None:
        if hand.peer:
            self.say(b"\x03\x20\x00" + hand._mac(Role.DIAL))
            self.listen()


def _handshake(secret: bytes = b"guess" * 8, job: str = "job", generation: int = 0, me: str = "a") -> Handshake:
    return Handshake(Role.DIAL, secret=secret, job=job, me=me, generation=generation)


def _says(*parts: bytes) -> Callable[[Stranger, Door], None]:
    def attack(stranger: Stranger, _door: Door) -> None:
        for part in parts:
            stranger.say(part)
            stranger.listen(2)

    return attack


def _greets(**how: object) -> Callable[[Stranger, Door], None]:
    return lambda stranger, _door: stranger.greet(_handshake(**how))  # type: ignore[arg-type]


def _replays(stranger: Stranger, door: Door) -> None:
    """What a member said when it came in, word for word."""
    said = b""
    member, hand = Stranger(door), _handshake(secret=SECRET, me="m9")
    say = member.say

    def record(data: bytes) -> None:
        nonlocal said
        said += data
        say(data)

    member.say = record  # type: ignore[method-assign]
    member.greet(hand)
    assert hand.done
    member.sock.close()
    stranger.say(said)
    stranger.listen()


def _reflects(stranger: Stranger, door: Door) -> None:
    """The proof that the other end gives of itself, as one's own."""
    stranger.say(_handshake().bytes_to_send())
    stranger.listen()
    stranger.say(stranger.heard)
    stranger.say(b"\x03\x20\x00" + stranger.heard[-32:])
    stranger.listen()


def _goes_in_the_middle(stranger: Stranger, _door: Door) -> None:
    stranger.say(_handshake().bytes_to_send()[:20])
    stranger.listen(2)
    stranger.sock.shutdown(socket.SHUT_WR)
    stranger.listen()


def _drips(stranger: Stranger, _door: Door) -> None:
    for byte in _handshake().bytes_to_send():
        stranger.say(bytes([byte]))
        stranger.listen(1)


ATTACKS: dict[str, Callable[[Stranger, Door], None]] = {
    "says nothing": _says(),
    "speaks another protocol": _says(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "makes noise": _says(random.Random(1).randbytes(100_000)),
    "makes noise in TLS records": _says(b"\x16\x03\x01\x02\x00" + bytes(512)),
    "announces 65,535 bytes": _says(b"\x01\xff\xff" + bytes(10)),
    "announces 513 bytes": _says(b"\x01\x01\x02" + bytes(10)),
    "skips the greeting": _says(b"\x03\x20\x00" + bytes(32)),
    "says welcome": _says(b"\x04\x00\x00"),
    "refuses": _says(b"\x05\x02\x00no"),
    "sends frames at once": _says(b"ELFR\x01\x00\x01\x00" + bytes(100)),
    "goes in the middle": _goes_in_the_middle,
    "drips": _drips,
    "has another secret": _greets(),
    "has no secret": _greets(secret=b""),
    "is of another job": _greets(secret=SECRET, job="another"),
    "has a name that is a member's": _greets(me="c"),
    "claims a newer generation": _greets(generation=1 << 62),
    "replays": _replays,
    "reflects": _reflects,
}


WAITED_FOR = {"says nothing", "drips"}  # until the deadline


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    with DOORS[request.param]() as made:
        yield made


@pytest.mark.parametrize("attack", ATTACKS)
def test_strangers_get_nowhere_and_hear_little(door: Door, attack: str) -> None:
    stranger = Stranger(door)
    members = {"m9"} if attack == "replays" else set()
    ATTACKS[attack](stranger, door)
    stranger.listen()
    assert stranger.closed == (attack not in WAITED_FOR)
    assert set(door.inside()) <= members
    assert len(stranger.heard) <= SAID_BYTES_MOST
    stranger.sock.close()
    _until(door, lambda: not door.unproven())
    assert set(door.inside()) <= members


def test_a_member_gets_in_where_strangers_do_not(door: Door) -> None:
    """So that the test above means something."""
    member, hand = Stranger(door), _handshake(secret=SECRET, me="m1")
    member.greet(hand)
    assert hand.done
    member.sock.close()


def _until(door: Door, claim: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not claim():
        assert time.monotonic() < until_s
        door.turn()


def test_ten_thousand_strangers_leave_nothing(door: Door) -> None:
    """One after the other, with every kind of beginning; and as many at once as the door takes."""
    greeting = _handshake().bytes_to_send()
    beginnings = [b"", b"\x01", greeting, greeting[:30], bytes(2000), b"\x01\xff\xff", greeting + bytes(500)]
    _visit(door, beginnings, 200)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        _visit(door, beginnings, 10_000)
        after, peak = tracemalloc.get_traced_memory()
        assert after - before < 256 << 10 and peak - before < 4 << 20
        with ExitStack() as open_:
            for number in range(100):  # a door's queue in the kernel is at least as long
                sock = open_.enter_context(door.connect())
                sock.send(greeting[: 1 + number % len(greeting)])
                door.turn()
            assert 60 < door.unproven() <= 256
            assert tracemalloc.get_traced_memory()[1] - before < 8 << 20
    finally:
        tracemalloc.stop()
    assert door.inside() == []


def _visit(door: Door, beginnings: list[bytes], count: int) -> None:
    for number in range(count):
        sock = door.connect()
        sock.send(beginnings[number % len(beginnings)])
        if number % 16 == 0:
            door.turn()
        sock.close()
    _until(door, lambda: not door.unproven())


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize("name", ["a member's UNIX socket", "an agent's UNIX socket"])
def test_another_user_of_the_host_is_not_heard_at_all(name: str) -> None:
    with DOORS[name]() as door:
        here, there = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _be_somebody_else(door, there)
        there.close()
        until_s = time.monotonic() + WAIT_S
        while not select.select([here], [], [], 0)[0]:
            assert time.monotonic() < until_s
            door.turn()
        assert here.recv(100) == b"closed unheard"
        os.waitpid(pid, 0)
        here.close()
        assert door.inside() == []


def _be_somebody_else(door: Door, told: socket.socket) -> None:
    """In a child: greet with the right secret, and say what came of it."""
    try:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        sock = door.connect()
        sock.settimeout(WAIT_S)
        try:
            sock.send(_handshake(secret=SECRET).bytes_to_send())
            heard = sock.recv(100)
        except ConnectionError:
            heard = b""
        told.send(heard or b"closed unheard")
    finally:
        os._exit(0)
