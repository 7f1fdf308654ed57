"""Directories to spill to: whether they are fit for it, and files without a name in them. No torch here.

The command line refuses an unfit one before anything is started; an engine looks again when it opens its slab.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from elastrain.offload.errors import OffloadConfigError

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


def try_directory(directory: str | os.PathLike[str]) -> None:
    """Make a file there and let it go. Raises `OffloadConfigError` as one sentence where that does not work."""
    fd, _ = open_unnamed(check_directory(directory))
    os.close(fd)


def check_directory(directory: str | os.PathLike[str]) -> Path:
    """The directory as a path, or one sentence that says why activations cannot be spilled there."""
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
    """The type of the file system that holds `path`, as the kernel names it; empty if it does not say."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""


def open_unnamed(path: Path) -> tuple[int, bool]:
    """A descriptor of a file without a name, and whether it does direct I/O. Raises `OffloadConfigError`."""
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
    # No unnamed files here: make one and remove its name at once.
    plain, name = tempfile.mkstemp(prefix=".elastrain-", dir=path)
    try:
        return os.open(name, os.O_RDWR | os.O_CLOEXEC | flags)
    finally:
        os.close(plain)
        os.unlink(name)
