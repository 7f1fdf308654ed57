"""Limits on one worker by the kernel's control groups (version 1, for root): a share of a core, or no more memory."""

from __future__ import annotations

from pathlib import Path

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
