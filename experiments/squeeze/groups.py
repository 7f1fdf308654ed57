"""Memory cgroups (version 1 or 2) below this process's own: a folder for the groups of a job's members.

Only files are made, read and removed here. Where no group can be made, there is none, and only the measured peaks tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def own_group() -> Path | None:
    """The memory cgroup that this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    return None


@contextmanager
def folder_of_groups(name: str) -> Iterator[Path | None]:
    """A group that members' groups are made in; removed in the end with all that are left in it. None if forbidden."""
    own = own_group()
    folder = None if own is None else own / name
    try:
        if folder is not None:
            folder.mkdir()
    except OSError:
        folder = None
    try:
        yield folder
    finally:
        if folder is not None:
            for group in folder.iterdir():
                if group.is_dir():
                    group.rmdir()
            folder.rmdir()


def peaks_bytes(groups: Path) -> dict[str, int]:
    """Member -> the most that the kernel ever counted for it: anonymous and shared memory, page tables, page cache."""
    return {
        group.name: int((group / "memory.max_usage_in_bytes").read_text())
        for group in groups.iterdir()
        if group.is_dir()
    }


def ended_for_memory(groups: Path) -> tuple[str, ...]:
    """Members in whose group the kernel had to end a process."""
    return tuple(
        sorted(
            group.name
            for group in groups.iterdir()
            if group.is_dir() and "oom_kill 0" not in (group / "memory.oom_control").read_text()
        )
    )
