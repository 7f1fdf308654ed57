"""Files of this node that its agent gives to workers of other nodes: checkpoints, and the compile cache if asked to."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from elastrain.base import compile_cache
from elastrain.base.disk_protocol import CacheFiles, CacheRead, CacheRequest, DiskRequest, is_cache_name

if TYPE_CHECKING:
    from elastrain.snapshot.durable.places.node import ServedDisk

SETTLED_S = 2.0
"""Seconds since the last change after which a file is given: compilers write some files in place."""
FILES_MAX = 100_000
_FILE_BYTES_MAX = 1 << 30
_NOT_GIVEN = ("locks", "_build_temp", ".tmp", ".lock", ".pid_")
"""Parts of the names of files that compilers use while they work."""


class ServedFiles:
    """The answers to one reader. `location`: the place of checkpoints, `cache`: the cache folder; None: not given."""

    def __init__(self, location: str | None, cache: Path | None) -> None:
        self._location, self._cache = location, cache
        self._disk: ServedDisk | None = None

    def answer(self, request: DiskRequest) -> tuple[bool, bytes | bytearray]:
        """Return `(True, body)`, or `(False, sentence)` if the request failed."""
        if isinstance(request, CacheFiles | CacheRead):
            if self._cache is None:
                return False, b"this node was not started with --share-compile-cache"
            return _of_cache(self._cache, request)
        if self._location is None:
            return False, b"this node has no checkpoints of its own"
        if self._disk is None:
            # Imported here, because an agent of a job without checkpoints does not need it.
            from elastrain.snapshot.durable.places.node import ServedDisk
            from elastrain.snapshot.durable.places.port import place_at

            self._disk = ServedDisk(place_at(self._location))
        return self._disk.answer(request)

    def close(self) -> None:
        """Close the file of the last request."""
        if self._disk is not None:
            self._disk.close()


def _of_cache(folder: Path, request: CacheRequest) -> tuple[bool, bytes]:
    try:
        if isinstance(request, CacheFiles):
            if request.stamp != (own := compile_cache.stamp()):
                return False, f"this node runs code for {own}, and not for {request.stamp}".encode()
            return True, msgspec.json.encode(sorted(given_files(folder, time.time()))[:FILES_MAX])
        if not is_cache_name(request.file):
            return False, f"{request.file!r} is no file of a cache".encode()
        return True, _read(folder, request)
    except OSError as error:
        return False, f"the compile cache cannot be read: {error}".encode()


def given_files(folder: Path, now: float) -> Iterator[tuple[str, int]]:
    """Yield names and sizes of the files in a cache that no compiler is writing. Links are left out."""
    for place, folders, files in os.walk(folder):
        folders[:] = [each for each in folders if not any(part in each for part in _NOT_GIVEN)]
        for file in files:
            path = Path(place, file)
            name = path.relative_to(folder).as_posix()
            if any(part in file for part in _NOT_GIVEN) or not is_cache_name(name) or path.is_symlink():
                continue
            with suppress(OSError):  # it was removed meanwhile
                found = path.stat()
                if now - found.st_mtime >= SETTLED_S and found.st_size <= _FILE_BYTES_MAX:
                    yield name, found.st_size


def _read(folder: Path, request: CacheRead) -> bytes:
    """Return a piece of a file in the folder. Raises OSError, also for a link that leads out of it."""
    path = folder / request.file
    if not path.resolve().is_relative_to(folder.resolve()):
        raise OSError(f"{request.file} lies elsewhere")
    with path.open("rb") as file:
        file.seek(request.offset_bytes)
        data = file.read(request.size_bytes)
    if len(data) != request.size_bytes:
        raise OSError(f"{request.file} has no {request.size_bytes} bytes from {request.offset_bytes} on")
    return data
