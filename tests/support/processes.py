"""What runs on this machine, as /proc tells it: sessions and process groups of the jobs that tests start."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from pathlib import Path


def in_sessions(sessions: Collection[int]) -> list[str]:
    """Process ids of all that belong to these sessions and still run."""
    left = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) in sessions and fields[0] != "Z":
            left.append(stat.parent.name)
    return left


def kill_group(pid: int) -> None:
    """SIGKILL to all of a process group, if any of it is left."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
