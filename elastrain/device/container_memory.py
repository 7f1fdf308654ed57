"""Memory that the kernel's control groups leave to this process, as in a container. Versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Names of the files with the limit and the usage: version 2, version 1."""


def group_memory(own: Path = _OWN, root: Path = _ROOT) -> tuple[int, int] | None:
    """Return the free bytes and the limit in bytes of the tightest group. None if no group has a limit.

    Args:
        own: File of the kernel that names the groups of this process.
        root: Folder where the groups are mounted.
    """
    found = [seen for folder in _folders(own, root) for names in _FILES if (seen := _free_and_limit(folder, *names))]
    return min(found, default=None)


def _folders(own: Path, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups and of the groups around them: each of them may have a limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if controllers not in ("", "memory"):
            continue
        mounted = root / controllers
        group = mounted / path.lstrip("/")
        # In a container the path may begin outside of what is mounted. The mounted root is the container's group then.
        yield from (each for each in (group, *group.parents) if each == mounted or mounted in each.parents)


def _free_and_limit(folder: Path, limit_name: str, usage_name: str) -> tuple[int, int] | None:
    try:
        limit, usage = (folder / limit_name).read_text().strip(), int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    # The kernel drops pages of files that nobody uses before it ends a process.
    idle_bytes = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return max(0, int(limit) - usage + idle_bytes), int(limit)
