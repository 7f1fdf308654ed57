"""A temporary folder with a lock held by its process. A later command can so detect folders of dead processes."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def held_folder(prefix: str, inside: Path | None = None) -> Iterator[Path]:
    """Create a folder with this prefix, and remove it at the end. Folders of killed processes are removed first.

    `inside` is the parent folder, by default that for temporary files. On NFS, which has no such locks, folders of
    killed processes stay.
    """
    inside = inside or Path(tempfile.gettempdir())
    _remove_abandoned(prefix, inside)
    folder, hold = _made(prefix, inside)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(hold)


def _made(prefix: str, inside: Path) -> tuple[Path, int]:
    """Create a folder and lock it.

    Returns it with the descriptor of the lock, which the kernel frees with the process.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=inside))
        hold = _opened(folder)
        if hold is None:
            continue
        with suppress(OSError):
            fcntl.flock(hold, fcntl.LOCK_EX)
        # Before it was locked, another process may have taken its owner for dead and removed it.
        if folder.exists():
            return folder, hold
        os.close(hold)


def _remove_abandoned(prefix: str, inside: Path) -> None:
    for folder in inside.glob(f"{glob.escape(prefix)}*"):
        hold = _opened(folder)
        if hold is None:
            continue
        try:
            fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass  # its owner lives, or there are no such locks
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(hold)


def _opened(folder: Path) -> int | None:
    """Return a descriptor of the folder, or None if it is gone, is not a folder, or belongs to another user."""
    try:
        hold = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    if os.fstat(hold).st_uid == os.geteuid():
        return hold
    os.close(hold)
    return None
