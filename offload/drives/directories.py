"""Checks of directories for spilled data, and unnamed files in them. No torch.

The command line refuses an unfit directory before it starts anything. An engine checks again when it opens its slab.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from elastrain.offload.errors import OffloadConfigError

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


def try_directory(directory: str | os.PathLike[str]) -> None:
    """Create an unnamed file in the directory and close it. Raises `OffloadConfigError` if that fails."""
    fd, _ = open_unnamed(check_directory(directory))
    os.close(fd)


def check_directory(directory: str | os.PathLike[str]) -> Path:
    """Return the directory as a path. Raises `OffloadConfigError` if it is missing, not writable, or in memory."""
    path = Path(directory)
    if not path.is_dir():
        raise OffloadConfigError(f"{path} is not a directory: create it on an SSD, or name another one")
    if not os.access(path, os.W_OK | os.X_OK):
        raise OffloadConfigError(f"{path} is not writable by this process: change its rights, or name another one")
    kind = file_system(path)
    if kind in MEMORY_FILE_SYSTEMS:
        raise OffloadConfigError(f"{path} is on {kind}, which is memory itself: name a directory on an SSD")
    return path


def file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`, as the kernel names it, or "" if unknown."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""


def open_unnamed(path: Path) -> tuple[int, bool]:
    """Return the descriptor of a new unnamed file, and True if it uses direct I/O. Raises `OffloadConfigError`."""
    for flags, direct in ((os.O_DIRECT, True), (0, False)):
        try:
            return _open_with(path, flags), direct
        except OSError as fault:
            if fault.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise OffloadConfigError(
                    f"no file can be made in {path}: {fault.strerror}; name another one"
                ) from fault
    raise OffloadConfigError(f"no file can be made in {path}: name another directory")


def _open_with(path: Path, flags: int) -> int:
    try:
        return os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError as fault:
        if fault.errno not in (errno.EISDIR, errno.EOPNOTSUPP, errno.ENOENT):
            raise
    # This file system has no unnamed files: create a named one and remove its name at once.
    plain, name = tempfile.mkstemp(prefix=".elastrain-", dir=path)
    try:
        return os.open(name, os.O_RDWR | os.O_CLOEXEC | flags)
    finally:
        os.close(plain)
        os.unlink(name)
