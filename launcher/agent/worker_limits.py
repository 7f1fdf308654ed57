"""Priorities of workers, and limits on their CPU time or memory. Linux only.

A worker warms up at low priority while other workers train, and gets full priority once it is a member. With autogroups
on, Linux schedules sessions against each other, so `nice` alone has no effect between workers. The autogroup's own
value is set as well. No priority is lowered that could not be raised again.

Limits use the kernel's control groups (version 1, as root): a share of a core, or no further memory.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

WARM_UP_NICE = 5
"""Nice value for a third of a member's share. With 10, a tenth, a joiner of a two-core machine took 45 s."""
AHEAD_NICE = -4
"""Nice value of a newcomer in its first step: nearly twice a member's share if cores are scarce."""
_CAP_SYS_NICE = 23


def lower(pid: int) -> None:
    """Lower the priority of the process. Call this before it has threads, because they inherit the value."""
    _set_autogroup(pid, WARM_UP_NICE)
    if _may_raise():
        _set_nice(pid, min(_own_nice() + WARM_UP_NICE, 19))


def restore(pid: int) -> bool:
    """Restore the priority of all present threads of the process.

    Returns False if the kernel refuses, because it limits how often this may be done. Try again soon.
    """
    done = _set_autogroup(pid, 0)
    if _may_raise():
        # Twice, because a thread that started meanwhile may have inherited the low priority.
        _set_nice(pid, _own_nice())
        _set_nice(pid, _own_nice())
    return done


def ahead(pid: int) -> bool:
    """Restore the priority and, if permitted, raise it above all others. Returns False as `restore` does."""
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
        pass  # no autogroups in this kernel, or the process has ended; it keeps its priority
    return True


def _own_nice() -> int:
    """Return the agent's nice value, with which workers begin. An autogroup always begins with 0."""
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
    """A control group of its own for one process and its future children."""

    def __init__(self, controller: str, pid: int, name: str) -> None:
        """Compute the group's folder, `path`. Raises OSError if the kernel does not have the controller."""
        self._before = ROOT / controller / _path_in(controller, pid)
        self.path = self._before / name
        self._controller, self._pid = controller, pid

    def begin(self, **values: int) -> None:
        """Create the group with these values (`cfs_quota_us=…`), and move the process into it. Raises OSError."""
        self.path.mkdir()
        try:
            for name, value in values.items():
                (self.path / f"{self._controller}.{name}").write_text(str(value))
            (self.path / "cgroup.procs").write_text(str(self._pid))
        except OSError:
            self.path.rmdir()
            raise

    def end(self) -> None:
        """Move the remaining processes back, and remove the group.

        Raises OSError if a process that has just ended keeps the group for a moment.
        """
        for pid in (self.path / "cgroup.procs").read_text().split():
            try:
                (self._before / "cgroup.procs").write_text(pid)
            except ProcessLookupError:
                continue
        self.path.rmdir()


def throttled(pid: int, name: str, share: float) -> Limited:
    """Limit a process to this share of one core. Raises OSError."""
    limited = Limited("cpu", pid, name)
    limited.begin(cfs_period_us=_PERIOD_US, cfs_quota_us=max(_LEAST_QUOTA_US, round(share * _PERIOD_US)))
    return limited


def out_of_memory(pid: int, name: str, room_mib: float) -> Limited:
    """Limit a process to `room_mib` MiB of further memory. With the next page the kernel kills it. Raises OSError."""
    # The memory that it has already stays charged to its former group.
    limited = Limited("memory", pid, name)
    limited.begin(limit_in_bytes=max(1 << 20, round(room_mib * (1 << 20))))
    return limited


def _path_in(controller: str, pid: int) -> str:
    """Return the group of the process below the controller's root. Raises OSError if there is no such controller."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    raise OSError(f"the kernel has no {controller} controller (cgroup version 1) here")
