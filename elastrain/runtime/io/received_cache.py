"""The compile cache of another node, copied into this node's before a worker compiles.

One worker of the node copies, and the others wait for it. A job does not depend on the result: what is missing is
compiled here.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from elastrain.base.compile_cache import CacheSources, stamp
from elastrain.base.disk_protocol import READ_BYTES_MAX, CacheFiles, CacheRead, DiskRequest, is_cache_name
from elastrain.base.environment import Environment, cache_sources

if TYPE_CHECKING:
    from elastrain.runtime.io.journal import Journal

RECEIVE_S = 60.0
"""Seconds after which a worker stops copying and compiles what is missing."""
TOTAL_BYTES_MAX = 8 << 30
_LOCK, _MARKER = ".elastrain-lock", ".elastrain-received"
_LISTING: msgspec.json.Decoder[list[tuple[str, int]]] = msgspec.json.Decoder(list[tuple[str, int]])


class CacheGiver(Protocol):
    """A connection to another node's agent."""

    def ask(self, request: DiskRequest, into: memoryview | None = None) -> bytes:
        """Send a request, and return the body of the answer, or write it into `into`. Raises CheckpointError."""


def receive(environment: Environment, journal: Journal) -> None:
    """Copy the cache of the first node that gives one, unless a worker of this node did so before."""
    sources = cache_sources()
    if sources is None:
        return
    # Imported here, because few jobs need it.
    from elastrain.runtime.durable.node_disks import WayTo, reader_of
    from elastrain.snapshot.durable.errors import CheckpointError

    reader, until_s = reader_of(environment, ""), time.monotonic() + RECEIVE_S
    with _alone_on_node(sources) as is_first:
        for peer in sources.peers if is_first else ():
            way, began_s = WayTo(peer, reader), time.monotonic()
            try:
                files, size_bytes = copy(way, sources.folder, until_s)
            except (CheckpointError, OSError, ValueError) as error:
                journal.write("compile_cache", node=peer.node, files=0, reason=str(error))
                continue
            finally:
                way.close()
            if files:
                took_s = round(time.monotonic() - began_s, 3)
                journal.write("compile_cache", node=peer.node, files=files, size_bytes=size_bytes, took_s=took_s)
                (sources.folder / _MARKER).touch(mode=0o600)
                return


@contextmanager
def _alone_on_node(sources: CacheSources) -> Iterator[bool]:
    """Hold the lock of the folder. Yields True if no worker of this node has received a cache yet."""
    sources.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(sources.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it ends with its process, too
        yield not (sources.folder / _MARKER).exists()
    finally:
        os.close(lock)


def copy(way: CacheGiver, folder: Path, until_s: float) -> tuple[int, int]:
    """Copy the files that the folder lacks. Returns their number and bytes.

    Raises ValueError for names and sizes that no cache has, and TimeoutError after `until_s` of the monotonic clock.
    """
    listed = _LISTING.decode(way.ask(CacheFiles(stamp=stamp())))
    for name, size in listed:
        if size < 0 or not is_cache_name(name):
            raise ValueError(f"{name!r} is no file of a cache")
    if sum(size for _, size in listed) > TOTAL_BYTES_MAX:
        raise ValueError(f"the cache has more than {TOTAL_BYTES_MAX:,} bytes")
    lacking = [(name, size) for name, size in listed if not (folder / name).exists()]
    for number, (name, size) in enumerate(lacking):
        if time.monotonic() > until_s:
            raise TimeoutError(f"{RECEIVE_S:.0f} s were over after {number} of {len(lacking)} files")
        _write(way, folder, name, size)
    return len(lacking), sum(size for _, size in lacking)


def _write(way: CacheGiver, folder: Path, name: str, size: int) -> None:
    """Write one file, which appears under its name once it is complete."""
    path = folder / name
    for parent in [folder, *(folder / each for each in reversed(Path(name).parents[:-1]))]:
        parent.mkdir(mode=0o700, exist_ok=True)  # `parents=True` would make the parents with another mode
    temporary = path.with_name(f".{os.getpid()}.receiving")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        for start in range(0, size, READ_BYTES_MAX):
            piece = min(READ_BYTES_MAX, size - start)
            data = way.ask(CacheRead(file=name, offset_bytes=start, size_bytes=piece))
            if len(data) != piece:
                raise ValueError(f"{len(data)} bytes of {name!r} came for {piece}")
            file.write(data)
    temporary.replace(path)
