"""The listener for workers and other agents, and the disk server for workers of other nodes.

No message is read before the handshake has proven the job's secret. Proven connections go to `worker_processes` and
`agent_links`. Each reader of this node's disk has a thread, so that a slow one does not block the agent. Readers can
only get parts and manifests of checkpoints and, if the user has asked for it, files of the compile cache.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

from elastrain.base import disk_protocol as dp
from elastrain.base.event_loop import EventLoop
from elastrain.comm.errors import CommError
from elastrain.comm.wire.acceptor import Acceptor, AcceptorEvents, AcceptorLimits
from elastrain.comm.wire.handshake import Handshake, Role
from elastrain.comm.wire.secure import BlockingStream, Connection
from elastrain.errors import ConfigError
from elastrain.launcher.nodes.served_files import ServedFiles

_GREETINGS_MAX = 64
_GREETING_S = 5.0


def open_door(
    loop: EventLoop,
    listener: socket.socket,
    handshake: Callable[[], Handshake],
    admit: Callable[[str, Connection], str | None],
    log_refusal: Callable[[str], None],
) -> Acceptor:
    """Accept connections.

    `admit(name, connection)` takes a proven one or returns why not; `log_refusal` gets all refusals.
    """
    events = AcceptorEvents(
        new_handshake=handshake, admit=lambda proven, sock: admit(proven.peer, sock), refused=log_refusal
    )
    limits = AcceptorLimits(introductions_max=_GREETINGS_MAX, handshake_timeout_s=_GREETING_S)
    return Acceptor(loop, [listener], events, limits)


def workers_handshake(
    secret: bytes, job: str, objection: Callable[[str], str | None] = lambda member: None
) -> Handshake:
    """Return the agent's end of a handshake with a worker.

    `objection(member)` returns the reason for a refusal, or None.
    """
    made = Handshake(Role.ACCEPT, secret=secret, job=job, me="agent")
    made.objection = objection
    return made


def listen_abstract(name: str) -> socket.socket:
    """Open a listening abstract Unix socket. Raises ConfigError if the name is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind("\0" + name)
    except OSError:
        listener.close()
        raise ConfigError(f"a job of this name already runs here ({name}): choose another --rdzv-id") from None
    listener.listen(128)
    return listener


def accept(listener: socket.socket) -> socket.socket | None:
    """Return a new non-blocking connection, or None if it was closed before it was accepted."""
    try:
        sock, _ = listener.accept()
    except OSError:
        return None
    sock.setblocking(False)
    return sock


READERS_MAX = 256
IDLE_S = 600.0
"""Time in seconds after which a reader without requests is disconnected."""


class DiskDoor:
    """A server of files of this node.

    Args:
        location: Place of its checkpoints, or None if no node has a disk of its own.
        log: Writes an event with fields.
        cache: Folder of its compile cache, or None if other nodes do not get it.
    """

    def __init__(self, location: str | None, log: Callable[..., None], cache: Path | None = None) -> None:
        self._location, self._cache = location, cache
        self._log = log
        self._readers: set[Connection] = set()
        self._lock = threading.Lock()

    def admit(self, name: str, connection: Connection) -> str | None:
        """Serve a proven connection in a new thread, or return the reason for a refusal.

        Called by the agent's thread.
        """
        with self._lock:
            if self._location is None and self._cache is None:
                return f"{name} wants to read from a disk that is not this node's own"
            if len(self._readers) >= READERS_MAX:
                return f"{READERS_MAX} workers read from this disk already"
            self._readers.add(connection)
        threading.Thread(target=self._serve, args=(name, connection), name="elastrain-disk", daemon=True).start()
        return None

    def _serve(self, name: str, connection: Connection) -> None:
        stream, served = BlockingStream(connection, IDLE_S), ServedFiles(self._location, self._cache)
        try:
            while True:
                (length,) = dp.LENGTH.unpack(stream.receive(dp.LENGTH.size))
                if length > dp.REQUEST_BYTES_MAX:
                    raise ValueError(f"a request has {length} bytes")
                well, body = served.answer(dp.decode_request(stream.receive(length)))
                stream.send(dp.ANSWER.pack(well, len(body)))
                stream.send(body)
        except EOFError:
            pass
        except (OSError, CommError, ValueError) as error:
            self._log("disk_reader", reader=name, reason=str(error))
        finally:
            with self._lock:
                self._readers.discard(connection)
            served.close()
            connection.close()
