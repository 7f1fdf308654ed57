"""What tests of one run share, whichever of its processes they are in: a folder of files, each made once."""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

FOLDER = "TESTS_SHARED"
"""Environment variable: the folder, which the process makes that starts the others; it removes it at the end."""


def open_folder() -> Path:
    """Make the folder, for this process and those that it starts."""
    folder = tempfile.mkdtemp(prefix="elastrain-tests-")
    os.environ[FOLDER] = folder
    atexit.register(_remove, folder, os.getpid())
    return Path(folder)


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def _folder() -> Path:
    told = os.environ.get(FOLDER)
    return Path(told) if told is not None else open_folder()


def once(key: str, make: Callable[[Path], object]) -> Path:
    """A folder with what `make` puts there. The first to ask has it made; others wait, and find it.

    If `make` raises, so does this, and the next to ask makes it anew.
    """
    place = _folder() / hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
    place.mkdir(exist_ok=True)
    made, content = place / "made", place / "content"
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(content, ignore_errors=True)
            content.mkdir()
            make(content)
            made.touch()
    return content
