"""The places that a worker reads an initial checkpoint from: one folder, or the disks of several nodes.

This node's disk is read directly. Disks of other nodes are read through their agents, with the job's secret.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass

from elastrain.base.disk_protocol import ANSWER, READ_BYTES_MAX, READER, DiskRequest, encode_request
from elastrain.base.environment import Environment
from elastrain.base.resume import NodeDisk, Resume
from elastrain.comm.errors import CommError
from elastrain.comm.wire.handshake import Handshake, Role
from elastrain.comm.wire.secure import BlockingStream, dial
from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.places.node import NodePlace
from elastrain.snapshot.durable.places.port import ReadablePlace, place_at

CONNECT_S = 5.0
"""Seconds to wait for a connection."""
ANSWER_S = 30.0
"""Seconds to wait for an answer."""
_ANSWER_BYTES_MAX = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The identity of the reading worker. `source` is the place of the parts on its own node."""

    member: str
    node: str
    scope: str
    secret: bytes | None
    source: str


def reader_of(environment: Environment, source: str) -> Reader:
    """Return the reader of this worker."""
    return Reader(
        member=environment.member,
        node=environment.node,
        scope=environment.scope,
        secret=environment.secret,
        source=source,
    )


def places_of(resume: Resume, reader: Reader) -> list[ReadablePlace]:
    """Return the places to read, this node's disk first. Raises CheckpointError for an unusable URL."""
    if not resume.disks:
        return [place_at(resume.place)]
    own = [place_at(reader.source) for disk in resume.disks if disk.node == reader.node]
    others = [NodePlace(f"the disk of {d.node}", WayTo(d, reader)) for d in resume.disks if d.node != reader.node]
    return [*own, *others]


class WayTo:
    """A connection to another node's agent, opened at the first request. Several threads take turns."""

    def __init__(self, disk: NodeDisk, reader: Reader) -> None:
        self._disk, self._reader = disk, reader
        self._stream: BlockingStream | None = None
        self._lock = threading.Lock()

    def ask(self, request: DiskRequest, into: memoryview | None = None) -> bytes:
        """Send a request, and return the answer. See `places.node.Asking`."""
        with self._lock:
            try:
                if self._stream is None:
                    self._stream = self._connected()
                return _asked(self._stream, request, into)
            except (OSError, EOFError, CommError) as error:
                self._close()
                raise CheckpointError(f"the disk of {self._disk.node} cannot be read from here: {error}") from error

    def _connected(self) -> BlockingStream:
        host, _, port = self._disk.endpoint.rpartition(":")
        reader = self._reader
        handshake = Handshake(
            Role.DIAL, secret=reader.secret, job=reader.scope, me=READER + reader.member, expect=self._disk.door
        )
        sock = socket.create_connection((host.strip("[]"), int(port)), CONNECT_S)
        try:
            return BlockingStream(dial(sock, handshake, CONNECT_S), ANSWER_S)
        except CommError:
            sock.close()
            raise

    def close(self) -> None:
        """Close the connection. The next request opens another one."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _asked(stream: BlockingStream, request: DiskRequest, into: memoryview | None) -> bytes:
    stream.send(encode_request(request))
    well, size_bytes = ANSWER.unpack(stream.receive(ANSWER.size))
    if not well:
        raise CheckpointError(stream.receive(min(size_bytes, READ_BYTES_MAX)).decode(errors="replace"))
    if into is None:
        if size_bytes > _ANSWER_BYTES_MAX:
            raise EOFError(f"an answer of {size_bytes:,} bytes")
        return stream.receive(size_bytes)
    if size_bytes != into.nbytes:
        raise EOFError(f"{size_bytes:,} bytes were sent where {into.nbytes:,} were asked for")
    stream.receive_into(into)
    return b""
