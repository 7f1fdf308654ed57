"""Checkpoints on the disk of another node. The other node runs `ServedDisk`, and this node uses `NodePlace`.

The connection between them is behind `Asking`. No network here.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec

from elastrain.base.disk_protocol import READ_BYTES_MAX, CheckpointRequest, Names, Read, Size
from elastrain.snapshot.durable.errors import CheckpointError, DamagedError
from elastrain.snapshot.durable.manifest import MANIFEST, place_in_time
from elastrain.snapshot.durable.places.port import ReadablePlace, Source

T = TypeVar("T")


class Asking(Protocol):
    """A connection to the other node. Several threads may use it."""

    def ask(self, request: CheckpointRequest, into: memoryview | None = None) -> bytes:
        """Send a request, and return the body of the answer. Raises CheckpointError.

        With `into`, the body fills `into` instead, and an empty body is returned.
        """


class NodePlace:
    """A `port.ReadablePlace` on another node. `location` is its name in error messages."""

    def __init__(self, location: str, way: Asking) -> None:
        self._location, self._way = location, way

    @property
    def location(self) -> str:
        """The name of the place in error messages."""
        return self._location

    def names(self, folder: str = "") -> list[str]:
        """Ask the other node for the names in `folder`. Raises CheckpointError."""
        return _decoded(self._way.ask(Names(checkpoint=folder)), list[str], self._location)

    def open(self, name: str) -> Source:
        """Open a file of the other node. Raises CheckpointError if it is missing."""
        checkpoint, _, file = name.partition("/")
        size_bytes = _decoded(self._way.ask(Size(checkpoint=checkpoint, file=file)), int, self._location)
        return _NodeSource(
            self._way,
            f"{self._location}: {name}",
            Read(checkpoint=checkpoint, file=file, offset_bytes=0, size_bytes=1),
            size_bytes,
        )


class _NodeSource:
    """A file of another node. `first` is a request for any bytes of it, used as a template."""

    def __init__(self, way: Asking, name: str, first: Read, size_bytes: int) -> None:
        self._way, self._name, self._first, self._size_bytes = way, name, first, size_bytes

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read_into(self, view: memoryview, offset_bytes: int) -> None:
        if offset_bytes + view.nbytes > self._size_bytes:
            raise DamagedError(f"{self._name} is cut short: it has {self._size_bytes:,} bytes, and more belong to it")
        for start in range(0, view.nbytes, READ_BYTES_MAX):
            part = view[start : start + READ_BYTES_MAX]
            request = msgspec.structs.replace(self._first, offset_bytes=offset_bytes + start, size_bytes=part.nbytes)
            self._way.ask(request, part)

    def close(self) -> None:
        pass


class ServedDisk:
    """The answering side: reads a place for other nodes, in one thread.

    It gives out only manifests and parts of checkpoints.
    """

    def __init__(self, place: ReadablePlace) -> None:
        self._place = place
        self._open: tuple[str, Source] | None = None
        """The file of the last request. A reader asks for the shards of one file one after the other."""

    def answer(self, request: CheckpointRequest) -> tuple[bool, bytes | bytearray]:
        """Return `(True, body)`, or `(False, sentence)` if the request failed."""
        try:
            return True, self._answer(request)
        except CheckpointError as error:
            return False, str(error).encode()

    def close(self) -> None:
        """Close the file of the last request."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _answer(self, request: CheckpointRequest) -> bytes | bytearray:
        if place_in_time(request.checkpoint) is None:
            raise CheckpointError(f"{request.checkpoint!r} is no name of a checkpoint")
        if isinstance(request, Names):
            return msgspec.json.encode([file for file in self._place.names(request.checkpoint) if _may_be_told(file)])
        if not _may_be_told(request.file):
            raise CheckpointError(f"{request.file!r} is no part of a checkpoint")
        source = self._source(f"{request.checkpoint}/{request.file}")
        if isinstance(request, Size):
            return msgspec.json.encode(source.size_bytes)
        data = bytearray(request.size_bytes)
        source.read_into(memoryview(data), request.offset_bytes)
        return data

    def _source(self, name: str) -> Source:
        if self._open is None or self._open[0] != name:
            self.close()
            self._open = name, self._place.open(name)
        return self._open[1]


def _may_be_told(file: str) -> bool:
    return file == MANIFEST or (file.startswith("part-") and "/" not in file)


def _decoded(body: bytes, kind: type[T], location: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{location} answers what this node has not asked for: {error}") from None
