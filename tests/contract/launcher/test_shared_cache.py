"""The compile cache of another node, through its agent's door: real sockets, the real handshake."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastrain.base import compile_cache
from elastrain.base.compile_cache import INDUCTOR, PEERS, peers_as_text
from elastrain.base.disk_protocol import CacheFiles, CacheRead, DiskRequest, Names, is_cache_name
from elastrain.base.environment import Environment
from elastrain.base.resume import NodeDisk
from elastrain.launcher.nodes.door import DiskDoor
from elastrain.launcher.nodes.served_files import ServedFiles
from elastrain.runtime.io import received_cache
from elastrain.runtime.io.journal import Journal
from tests.contract.snapshot.test_node_disks import SECRET, Agent
from tests.support.training import _lines

FILES = {"ab/cabc.main.so": b"\x7fELF" * 5000, "fxgraph/xy/fxyz/entry": b"graph", "triton/k/kernel.cubin": b""}


class CacheAgent(Agent):
    """An agent whose node gives its compile cache, and no checkpoints."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__(Path())
        self.door = DiskDoor(None, self.log, folder)


def fill(folder: Path, seconds_ago: float = 10.0) -> Path:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        os.utime(folder / name, (time.time() - seconds_ago,) * 2)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    found = {each.relative_to(folder).as_posix(): each for each in folder.rglob("*") if each.is_file()}
    return {name: each.read_bytes() for name, each in found.items() if not name.startswith(".")}


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[dict[str, CacheAgent]]:
    made = {node: CacheAgent(fill(tmp_path / node)) for node in ("n0", "n1")}
    yield made
    for agent in made.values():
        agent.die()


def receive(
    agents: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: bytes = SECRET
) -> list[dict[str, Any]]:
    """Let a worker of a third node receive; return what its journal says of it."""
    peers = [
        NodeDisk(node=node, door="door", endpoint=f"127.0.0.1:{agent.listener.getsockname()[1]}")
        for node, agent in agents.items()
    ]
    monkeypatch.setenv(PEERS, peers_as_text(peers))
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "mine"))
    monkeypatch.setenv("ELASTRAIN_PROCESS", "")
    journal = Journal(tmp_path, "m9")
    environment = Environment(
        job="job",
        member="m9",
        node="n9",
        agent=None,
        secret=secret,
        run_dir=tmp_path,
        host=None,
        memory_limit_bytes=None,
        offload_dirs=(),
    )
    received_cache.receive(environment, journal)
    return [each for each in _lines(tmp_path / "members/m9.jsonl") if each["event"] == "compile_cache"]


def test_a_node_gets_the_whole_cache_once(
    agents: dict[str, CacheAgent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (told,) = receive(agents, tmp_path, monkeypatch)
    assert content(tmp_path / "mine") == FILES
    assert (told["node"], told["files"], told["size_bytes"]) == ("n0", 3, sum(map(len, FILES.values())))
    assert all(each.stat().st_mode & 0o077 == 0 for each in (tmp_path / "mine").rglob("*"))
    (tmp_path / "mine/ab/cabc.main.so").unlink()
    assert len(receive(agents, tmp_path, monkeypatch)) == 1, "the next worker of the node asks nobody"


def test_a_node_that_is_gone_or_refuses_is_done_without(
    agents: dict[str, CacheAgent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents["n0"].die()
    first, second = receive(agents, tmp_path, monkeypatch)
    assert "cannot be read from here" in first["reason"] and second["node"] == "n1"
    assert content(tmp_path / "mine") == FILES


def test_without_the_secret_nothing_comes(
    agents: dict[str, CacheAgent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = receive(agents, tmp_path, monkeypatch, secret=b"x" * 32)
    assert [each["files"] for each in told] == [0, 0] and content(tmp_path / "mine") == {}


def test_a_node_that_was_not_asked_to_share_gives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = CacheAgent(None)
    (told,) = receive({"n0": agent}, tmp_path, monkeypatch)
    agent.die()
    assert told["files"] == 0 and content(tmp_path / "mine") == {}
    served = ServedFiles(None, None)
    assert served.answer(CacheFiles(stamp="s")) == (False, b"this node was not started with --share-compile-cache")
    assert not served.answer(Names(checkpoint="life-0-step-1"))[0]


def test_another_machine_gets_nothing(tmp_path: Path) -> None:
    well, sentence = ServedFiles(None, fill(tmp_path / "n0")).answer(CacheFiles(stamp="another processor"))
    assert not well and b"and not for another processor" in sentence


def test_files_in_the_making_and_links_are_not_given(tmp_path: Path) -> None:
    folder = fill(tmp_path / "n0")
    (folder / "ab/new.so").write_bytes(b"half")
    for name in ("locks/a", "ab/x_build_temp/o", ".hidden"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
        os.utime(folder / name, (0, 0))
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    served = ServedFiles(None, folder)
    well, listed = served.answer(CacheFiles(stamp=compile_cache.stamp()))
    assert well and {name for name, _ in msgspec.json.decode(listed)} == FILES.keys()
    for name in ("link", "../secret", "/etc/passwd", "ab/../../secret"):
        assert not served.answer(CacheRead(file=name, offset_bytes=0, size_bytes=1))[0], name


class Liar:
    """A node that names a file outside of the folder."""

    def __init__(self, name: str, size: int = 4) -> None:
        self._listed = [(name, size)]

    def ask(self, request: DiskRequest, into: memoryview | None = None) -> bytes:
        return msgspec.json.encode(self._listed) if isinstance(request, CacheFiles) else b"evil"


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", ".elastrain-received", "a//b", "a\0b", ""])
def test_names_that_lead_elsewhere_are_refused_by_the_receiver(tmp_path: Path, name: str) -> None:
    assert not is_cache_name(name)
    with pytest.raises(ValueError, match="is no file of a cache"):
        received_cache.copy(Liar(name), tmp_path / "mine", time.monotonic() + 60)
    assert list(tmp_path.iterdir()) == []


def test_sizes_are_bounded_and_time_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than"):
        received_cache.copy(Liar("a", 1 << 50), tmp_path, time.monotonic() + 60)
    with pytest.raises(ValueError, match="came for 5"):
        received_cache.copy(Liar("a", 5), tmp_path, time.monotonic() + 60)
    with pytest.raises(TimeoutError, match="after 0 of 1 files"):
        received_cache.copy(Liar("a"), tmp_path / "late", time.monotonic() - 1)
    assert not (tmp_path / "a").exists()
