from __future__ import annotations

from pathlib import Path

import pytest

from elastrain.device.container_memory import group_memory
from elastrain.device.same_memory import HOST


def group(folder: Path, version: int, limit: str, usage: int, idle: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, text in zip((*names, "memory.stat"), (limit, str(usage), f"anon 5\ninactive_file {idle}"), strict=True):
        (folder / name).write_text(text + "\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_of_the_groups_around_a_process_counts(tmp_path: Path, version: int) -> None:
    own, root = tmp_path / "own", tmp_path / "groups"
    own.write_text("0::/pods/one\n" if version == 2 else "7:pids:/x\n4:memory:/pods/one\n0::/\n")
    mounted = root if version == 2 else root / "memory"
    group(mounted / "pods/one", version, "max" if version == 2 else str(1 << 62), usage=10, idle=0)
    group(mounted / "pods", version, "1000", usage=700, idle=200)
    assert group_memory(own, root) == (500, 1000)
    group(mounted / "pods/one", version, "400", usage=500, idle=0)
    assert group_memory(own, root) == (0, 400), "more in use than the limit: nothing is free"


def test_in_a_container_the_mounted_root_is_its_group(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "groups"
    own.write_text("0::/kubepods/pod1/c2\n")
    group(root, 2, "1000", usage=100, idle=0)
    assert group_memory(own, root) == (900, 1000)


@pytest.mark.parametrize("said", ["", "0::/\n", "4:memory:/a\n"])
def test_without_groups_or_limits_the_machine_counts(tmp_path: Path, said: str) -> None:
    own = tmp_path / "own"
    assert group_memory(own, tmp_path) is None
    own.write_text(said)
    assert group_memory(own, tmp_path) is None
    group(tmp_path, 2, "max", usage=1, idle=0)
    assert group_memory(own, tmp_path) is None


def test_the_host_says_no_more_than_its_group_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastrain.device.same_memory.group_memory", lambda: (1000, 5000))
    assert HOST.mem_get_info() == (1000, 5000)
