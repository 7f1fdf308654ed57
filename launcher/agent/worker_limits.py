"""Low priority for a worker that warms up while others train, and full priority once it is a member.

Linux schedules sessions against each other where autogroups are on, so that `nice` alone has no effect between workers:
the autogroup's own value is set as well. Nothing is lowered that could not be raised again.

Limits on one worker by the kernel's control groups (version 1, for root): a share of a core, or no more memory.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

WARM_UP_NICE = 5
"""A third of a member's share. A tenth (10) kept a joiner of a busy two-core machine from its first view for 45 s."""
AHEAD_NICE = -4
"""Of a newcomer in its first step: nearly twice a member's share where cores are scarce, nothing elsewhere."""
_CAP_SYS_NICE = 23


def lower(pid: int) -> None:
    """Before the process has threads: they inherit it."""
    _set_autogroup(pid, WARM_UP_NICE)
    if _may_raise():
        _set_nice(pid, min(_own_nice() + WARM_UP_NICE, 19))


def restore(pid: int) -> bool:
    """All threads that the process has by now. False: the kernel limits how often this may be done; try again soon."""
    done = _set_autogroup(pid, 0)
    if _may_raise():
        # Twice: a thread that was begun meanwhile may have inherited the low priority.
        _set_nice(pid, _own_nice())
        _set_nice(pid, _own_nice())
    return done


def ahead(pid: int) -> bool:
    """As `restore`, and where this process may, before all others; to be restored later."""
    done = restore(pid)
    if _may_raise():
        _set_autogroup(pid, AHEAD_NICE)
        _set_nice(pid, max(_own_nice() + AHEAD_NICE, -20))
    return done


def _set_autogroup(pid: int, nice: int) -> bool:
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))
    except BlockingIOError:
        return False
    except OSError:
        pass  # no autogroups in this kernel, or the process is gone: it merely keeps its priority
    return True


def _own_nice() -> int:
    """The agent's: what the workers began with. (An autogroup begins with 0, whoever makes it.)"""
    return os.getpriority(os.PRIO_PROCESS, 0)


def _set_nice(pid: int, nice: int) -> None:
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), nice)
    except OSError:
        pass  # a thread or the process has just ended


def _may_raise() -> bool:
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    if soft == resource.RLIM_INFINITY or soft >= 20:
        return True
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_NICE & 1)
    return False


ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_LEAST_QUOTA_US = 1000


class Limited:
    """A group of its own for a process and all its children from now on. Raises OSError where that may not be made."""

    def __init__(self, controller: str, pid: int, name: str) -> None:
        """`path`: where it is."""
        self._before = ROOT / controller / _path_in(controller, pid)
        self.path = self._before / name
        self._controller, self._pid = controller, pid

    def begin(self, **values: int) -> None:
        """Make the group with these values (`cfs_quota_us=…`), and move the process into it."""
        self.path.mkdir()
        try:
            for name, value in values.items():
                (self.path / f"{self._controller}.{name}").write_text(str(value))
            (self.path / "cgroup.procs").write_text(str(self._pid))
        except OSError:
            self.path.rmdir()
            raise

    def end(self) -> None:
        """Move back what is left in it, and remove it. A process that has just ended may keep it for a moment."""
        for pid in (self.path / "cgroup.procs").read_text().split():
            try:
                (self._before / "cgroup.procs").write_text(pid)
            except ProcessLookupError:
                continue
        self.path.rmdir()


def throttled(pid: int, name: str, share: float) -> Limited:
    """A process with this share of one core. Raises OSError."""
    limited = Limited("cpu", pid, name)
    limited.begin(cfs_period_us=_PERIOD_US, cfs_quota_us=max(_LEAST_QUOTA_US, round(share * _PERIOD_US)))
    return limited


def out_of_memory(pid: int, name: str, room_mib: float) -> Limited:
    """A process that may get so much more memory; with the next page after that the kernel kills it. Raises OSError."""
    # What it has already stays charged to the group that it comes from.
    limited = Limited("memory", pid, name)
    limited.begin(limit_in_bytes=max(1 << 20, round(room_mib * (1 << 20))))
    return limited


def _path_in(controller: str, pid: int) -> str:
    """Raises OSError where there is no such controller."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    raise OSError(f"the kernel has no {controller} controller (cgroup version 1) here")
