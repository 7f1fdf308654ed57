"""Checks of a drive: free room, the rates at which it writes and reads, and what would move a device's bytes there."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastrain.launcher.watch.preflight.check import StartCheck, judged
from elastrain.launcher.watch.preflight.machine_facts import told_by
from elastrain.launcher.watch.words import size

_TRIED_BYTES, _CHUNK_BYTES = 64 << 20, 4 << 20
_ROOM_LEAST_BYTES, _ROOM_GOOD_BYTES = 256 << 20, 10 << 30
_SLOW_RATE = 50e6
_MODULE = "elastrain.offload.drives.ways"
_PROBE_TIMEOUT_S = 240.0


def look(option: str, folder: Path) -> StartCheck:
    """Write and read a file of 64 MiB in the folder, which stays without traces. The folder may be missing yet."""
    name, there = f"{option} {folder}", folder
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        free_bytes = shutil.disk_usage(there).free
        if free_bytes < _ROOM_LEAST_BYTES:
            return judged(name, f"{size(free_bytes)} free", stops=True, advice="free some room, or name another folder")
        write_s, read_s = _timed(there)
    except OSError as error:
        return judged(
            name, error.strerror or str(error), stops=True, advice="name a folder that this user may write into"
        )
    return rated(name, free_bytes, _TRIED_BYTES / write_s, _TRIED_BYTES / read_s)


def rated(name: str, free_bytes: int, write_per_s: float, read_per_s: float) -> StartCheck:
    """Judge a drive by its free room and its rates in bytes per second."""
    return judged(
        name,
        f"{size(free_bytes)} free, writes {size(write_per_s)}/s, reads {size(read_per_s)}/s",
        warns=free_bytes < _ROOM_GOOD_BYTES or min(write_per_s, read_per_s) < _SLOW_RATE,
        advice="use a drive that is faster or has more room",
    )


def ways(folders: Sequence[Path]) -> list[StartCheck]:
    """Say for each folder what would move the bytes of a device there, as a process that imports torch finds out."""
    there = [str(folder) for folder in folders if folder.is_dir()]
    if not there:
        return []
    told = told_by(_MODULE, *there, timeout_s=_PROBE_TIMEOUT_S * len(there))
    return [way(folder, told) for folder in there]


def way(folder: str, told: Mapping[str, Any]) -> StartCheck:
    """Judge the answer about one folder."""
    name = f"device's bytes to {folder}"
    if "error" in told:
        return judged(name, told["error"], warns=True, advice="torch must be importable for an answer")
    return judged(name, f"{told[folder]['moved_by']}: {told[folder]['reason']}")


def _timed(folder: Path) -> tuple[float, float]:
    """Return the seconds to write the file down to the drive, and to read it back from there."""
    data = os.urandom(_CHUNK_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:
        begin_s = time.monotonic()
        for _ in range(_TRIED_BYTES // _CHUNK_BYTES):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        write_s = time.monotonic() - begin_s
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else it is read from memory
        file.seek(0)
        begin_s = time.monotonic()
        while file.read(_CHUNK_BYTES):
            pass
        return max(write_s, 1e-6), max(time.monotonic() - begin_s, 1e-6)
