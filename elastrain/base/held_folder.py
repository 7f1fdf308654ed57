"""A temporary folder that its process holds, so that the next command of its kind can tell that the owner is dead."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held_folder(prefix: str) -> Iterator[Path]:
    """A new folder with this prefix, removed at the end; those of killed processes with the same prefix go first."""
    _remove_abandoned(prefix)
    folder, hold = _made(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(hold)


def _made(prefix: str) -> tuple[Path, int]:
    """A folder, and the descriptor by which this process holds it: the kernel lets go of it with the process."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        hold = _opened(folder)
        if hold is None:
            continue
        fcntl.flock(hold, fcntl.LOCK_EX)
        # Until it was held, another process may have taken it for one whose owner is dead.
        if folder.exists():
            return folder, hold
        os.close(hold)


def _remove_abandoned(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        hold = _opened(folder)
        if hold is None:
            continue
        try:
            fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # its owner lives
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(hold)


def _opened(folder: Path) -> int | None:
    """None where it is gone, no folder, or another user's."""
    try:
        hold = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    if os.fstat(hold).st_uid == os.geteuid():
        return hold
    os.close(hold)
    return None
