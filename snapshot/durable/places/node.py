"""The disk of another node, as its checkpoints are read from here: `ServedDisk` there, `NodePlace` here. No network."""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec

from elastrain.base.disk_protocol import READ_BYTES_MAX, DiskRequest, Names, Read, Size
from elastrain.snapshot.durable.errors import CheckpointError, DamagedError
from elastrain.snapshot.durable.manifest import MANIFEST, place_in_time
from elastrain.snapshot.durable.places.port import ReadablePlace, Source

T = TypeVar("T")


class Asking(Protocol):
    """The way to the other node, for several threads."""

    def ask(self, request: DiskRequest, into: memoryview | None = None) -> bytes:
        """The answer's body, or nothing where it went into `into`, which it fills. Raises CheckpointError."""


class NodePlace:
    """See `port.ReadablePlace`. `location`: how sentences call it."""

    def __init__(self, location: str, way: Asking) -> None:
        self._location, self._way = location, way

    @property
    def location(self) -> str:
        return self._location

    def names(self, folder: str = "") -> list[str]:
        return _decoded(self._way.ask(Names(checkpoint=folder)), list[str], self._location)

    def open(self, name: str) -> Source:
        checkpoint, _, file = name.partition("/")
        size_bytes = _decoded(self._way.ask(Size(checkpoint=checkpoint, file=file)), int, self._location)
        return _NodeSource(
            self._way,
            f"{self._location}: {name}",
            Read(checkpoint=checkpoint, file=file, offset_bytes=0, size_bytes=1),
            size_bytes,
        )


class _NodeSource:
    """`first`: a request for any bytes of the file."""

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
    """Answers what others ask of a place; for one thread. Nothing but manifests and parts of checkpoints is told."""

    def __init__(self, place: ReadablePlace) -> None:
        self._place = place
        self._open: tuple[str, Source] | None = None
        """What was asked for last: shards of one file are asked for one after the other."""

    def answer(self, request: DiskRequest) -> tuple[bool, bytes | bytearray]:
        """Whether it went well, and the answer's body: a sentence where it did not."""
        try:
            return True, self._answer(request)
        except CheckpointError as error:
            return False, str(error).encode()

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _answer(self, request: DiskRequest) -> bytes | bytearray:
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
        raise CheckpointError(f"{location} answers what nobody has asked for: {error}") from None
