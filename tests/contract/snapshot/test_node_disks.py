"""The disk of another node, read through its agent's door: real sockets, the real handshake."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elastrain.base.disk_protocol import Names, Read, Size, decode_request, encode_request
from elastrain.base.resume import NodeDisk, Resume
from elastrain.comm.wire.handshake import Handshake, Role, run
from elastrain.comm.wire.secure import SecureSocket
from elastrain.launcher.nodes.door import DiskDoor
from elastrain.runtime.durable.node_disks import Reader, places_of
from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.manifest import LOOP, name_of
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.places.node import ServedDisk
from elastrain.snapshot.durable.reading import Checkpoint
from tests.support.checkpoints import save_on_disks, state

SECRET = b"s" * 32
NODES = ("n0", "n1", "n2")


class Agent:
    """A listener that lets readers in as an agent does."""

    def __init__(self, folder: Path) -> None:
        self.accepted: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.door = DiskDoor(str(folder), self.log)
        self.logged: list[Any] = []
        threading.Thread(target=self.serve, daemon=True).start()

    def log(self, event: str, **fields: Any) -> None:
        self.logged.append((event, fields))

    def serve(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:  # it was closed
                return
            self.accepted.append(sock)
            handshake = Handshake(Role.ACCEPT, secret=SECRET, job="job", me="door")
            try:
                run(sock, handshake, 5.0)
                secure = SecureSocket(sock, handshake)
                while not secure.establish():
                    pass
            except Exception:  # noqa: BLE001  a stranger: the agent goes on
                sock.close()
                continue
            self.door.admit(handshake.peer, secure)

    def die(self) -> None:
        """As a process that ends: its sockets close. May be called twice."""
        for sock in (self.listener, *self.accepted):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[dict[str, Agent]]:
    save_on_disks([LocalPlace(tmp_path / node) for node in NODES], 3)
    made = {node: Agent(tmp_path / node) for node in NODES}
    yield made
    for agent in made.values():
        agent.die()


def opened(agents: dict[str, Agent], node: str, tmp_path: Path, secret: bytes = SECRET) -> Checkpoint:
    disks = tuple(
        NodeDisk(node=name, door="door", endpoint=f"127.0.0.1:{agent.listener.getsockname()[1]}")
        for name, agent in agents.items()
    )
    resume = Resume(place="", name=name_of(0, 3), step=3, disks=disks)
    reader = Reader(member="m0", node=node, scope="job", secret=secret, source=str(tmp_path / node))
    return Checkpoint.open(places_of(resume, reader), resume.name)


def all_is_right(checkpoint: Checkpoint) -> bool:
    found = [each.digest() for each in checkpoint.read_shards(range(3))]
    return found == [state(shard, 3).digest() for shard in range(3)] and checkpoint.read_attachment(LOOP)[0] == "loop"


def test_every_node_reads_what_it_lacks_from_the_others(agents: dict[str, Agent], tmp_path: Path) -> None:
    for node in (*NODES, "elsewhere"):
        assert all_is_right(opened(agents, node, tmp_path))


def test_a_node_that_goes_meanwhile_is_replaced_by_the_other_copies(agents: dict[str, Agent], tmp_path: Path) -> None:
    checkpoint = opened(agents, "n0", tmp_path)
    checkpoint.lacking()  # its places have been looked into
    agents["n1"].die()
    assert all_is_right(checkpoint)


def test_a_node_that_is_gone_before_it_is_asked_is_done_without(agents: dict[str, Agent], tmp_path: Path) -> None:
    agents["n2"].die()
    assert all_is_right(opened(agents, "n0", tmp_path))


def test_two_that_go_leave_a_sentence(agents: dict[str, Agent], tmp_path: Path) -> None:
    one, other = opened(agents, "n0", tmp_path), opened(agents, "n0", tmp_path)
    one.lacking()
    for node in ("n1", "n2"):
        agents[node].die()
    with pytest.raises(CheckpointError, match="the disk of n1 cannot be read from here"):
        one.read_shard(1)
    with pytest.raises(CheckpointError, match=r"shard 1 of .* is missing: part-m1-"):
        other.read_shard(1)


def test_nobody_reads_without_the_secret(agents: dict[str, Agent], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="different secrets"):
        all_is_right(opened(agents, "elsewhere", tmp_path, secret=b"t" * 32))


def test_nothing_but_parts_and_manifests_is_told(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    save_on_disks([LocalPlace(tmp_path)], 3)
    (tmp_path / name_of(0, 3) / "other").write_text("x")
    disk = ServedDisk(LocalPlace(tmp_path))
    for request in (
        Names(checkpoint="."),
        Names(checkpoint=".."),
        Size(checkpoint=name_of(0, 3), file="other"),
        Size(checkpoint=name_of(0, 3), file="part-/../../secret"),
        Read(checkpoint="..", file="part-x", offset_bytes=0, size_bytes=1),
        Read(checkpoint=name_of(0, 3), file="manifest.json", offset_bytes=1 << 40, size_bytes=1),
    ):
        well, words = disk.answer(request)
        assert not well, words
    assert b"other" not in disk.answer(Names(checkpoint=name_of(0, 3)))[1]


@pytest.mark.parametrize("size_bytes", [0, -1, 1 << 30])
def test_requests_that_cannot_be_are_refused(size_bytes: int) -> None:
    good = Read(checkpoint="c", file="f", offset_bytes=0, size_bytes=1)
    assert decode_request(encode_request(good)[4:]) == good
    with pytest.raises(ValueError, match=r"can be read|Expected"):
        decode_request(encode_request(good)[4:].replace(b'"size_bytes":1', b'"size_bytes":%d' % size_bytes))
