"""Checks of this host: descriptors, locked memory, shared memory, and the clock."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from pathlib import Path

from elastrain.launcher.watch.preflight.check import StartCheck, judged
from elastrain.launcher.watch.words import duration, size

_FILES_LEAST, _FILES_GOOD = 256, 4096
_LOCKED_GOOD_BYTES = 64 << 10
_SHARED_LEAST_BYTES, _SHARED_GOOD_BYTES = 64 << 20, 1 << 30
_CLOCK_WARNS_S, _CLOCK_STOPS_S = 1.0, 60.0
_TIME_ERROR = 5
"""Answer of adjtimex for a clock that nothing keeps in time."""
SHARED = Path("/dev/shm")


def descriptors(limit: int) -> StartCheck:
    """Judge the limit of open files. Members of a host hold descriptors of each other's memory."""
    return judged(
        "descriptors",
        "no limit" if limit == resource.RLIM_INFINITY else f"{limit:,} open files",
        stops=0 <= limit < _FILES_LEAST,
        warns=0 <= limit < _FILES_GOOD,
        advice=f"raise it to {_FILES_GOOD:,} or more (ulimit -n)",
    )


def locked_memory(limit_bytes: int) -> StartCheck:
    """Judge the limit of locked memory, which some drivers of networks and drives need."""
    return judged(
        "memlock",
        "no limit" if limit_bytes == resource.RLIM_INFINITY else size(limit_bytes),
        warns=0 <= limit_bytes < _LOCKED_GOOD_BYTES,
        advice="raise it (ulimit -l unlimited)",
    )


def shared_memory(free_bytes: int | None) -> StartCheck:
    """Judge the free room of /dev/shm, which loaders and libraries use. None: it is not there."""
    if free_bytes is None:
        return judged("/dev/shm", "not mounted", stops=True, advice="mount a tmpfs there; in a container, --ipc=host")
    return judged(
        "/dev/shm",
        f"{size(free_bytes)} free",
        stops=free_bytes < _SHARED_LEAST_BYTES,
        warns=free_bytes < _SHARED_GOOD_BYTES,
        advice="give it more room; in a container, --shm-size or --ipc=host",
    )


def clock_kept(is_kept: bool | None) -> StartCheck:
    """Judge the clock of this host: True if something keeps it in time, None if the kernel does not say."""
    words = {True: "kept in time", False: "kept in time by nothing", None: "the kernel does not say"}
    return judged("clock", words[is_kept], warns=is_kept is False, advice="start a time service, such as chrony")


def clock_against(who: str, ahead_s: float) -> StartCheck:
    """Judge the difference between this clock and a peer's: positive if the peer's is ahead."""
    off_s = abs(ahead_s)
    return judged(
        f"clock of {who}",
        f"{duration(off_s)} {'ahead' if ahead_s > 0 else 'behind'}" if off_s >= 0.001 else "equal",
        stops=off_s >= _CLOCK_STOPS_S,
        warns=off_s >= _CLOCK_WARNS_S,
        advice="set both clocks by one time service: leases, certificates and logs go by them",
    )


def look() -> list[StartCheck]:
    """Look at this host."""
    return [
        descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        shared_memory(shutil.disk_usage(SHARED).free if os.path.ismount(SHARED) or SHARED.is_dir() else None),
        clock_kept(_is_kept()),
    ]


def _is_kept() -> bool | None:
    """Return True if the kernel's clock is synchronised. A zeroed request changes nothing."""
    answer = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    return None if answer < 0 else answer != _TIME_ERROR
