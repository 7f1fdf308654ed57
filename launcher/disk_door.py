"""Lets the workers of other nodes read the checkpoints that lie on this node's disk.

They come through the agents' door, proven and encrypted. Each has a thread here, so that a slow disk, or a slow reader,
keeps the agent from nothing. Only parts and manifests of checkpoints can be asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastrain.base import disk_protocol as dp
from elastrain.comm.errors import CommError
from elastrain.comm.wire.blocking import BlockingStream
from elastrain.comm.wire.secure import Connection

READERS_MAX = 256
IDLE_S = 600.0
"""A reader that asks for nothing for so long is gone."""


class DiskDoor:
    """`admit` is for the agent's thread. `location`: of the checkpoints; None where no node has a disk of its own."""

    def __init__(self, location: str | None, log: Callable[..., None]) -> None:
        self._location = location
        self._log = log
        self._readers: set[Connection] = set()
        self._lock = threading.Lock()

    def admit(self, name: str, connection: Connection) -> str | None:
        """Serve a proven connection until its end, or say why not."""
        with self._lock:
            if self._location is None:
                return f"{name} wants to read from a disk that is not this node's own"
            if len(self._readers) >= READERS_MAX:
                return f"{READERS_MAX} workers read from this disk already"
            self._readers.add(connection)
        args = (self._location, name, connection)
        threading.Thread(target=self._serve, args=args, name="elastrain-disk", daemon=True).start()
        return None

    def _serve(self, location: str, name: str, connection: Connection) -> None:
        # Late: an agent of a job without checkpoints needs nothing of them.
        from elastrain.snapshot.durable.places.node import ServedDisk
        from elastrain.snapshot.durable.places.opening import place_at

        stream, disk = BlockingStream(connection, IDLE_S), ServedDisk(place_at(location))
        try:
            while True:
                (length,) = dp.LENGTH.unpack(stream.receive(dp.LENGTH.size))
                if length > dp.REQUEST_BYTES_MAX:
                    raise ValueError(f"a request has {length} bytes")
                well, body = disk.answer(dp.decode_request(stream.receive(length)))
                stream.send(dp.ANSWER.pack(well, len(body)))
                stream.send(body)
        except EOFError:
            pass
        except (OSError, CommError, ValueError) as error:
            self._log("disk_reader", reader=name, reason=str(error))
        finally:
            with self._lock:
                self._readers.discard(connection)
            disk.close()
            connection.close()
