"""Where workers and other agents come in. Nobody is heard before the handshake has proven the job's secret.

Hands proven connections on; what is then said is for `worker_processes` and `links`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastrain.base.event_loop import EventLoop
from elastrain.comm.wire.handshake import Handshake, Role
from elastrain.errors import ConfigError
from elastrain.launcher.line_socket import peer_uid

_GREETINGS_MAX = 64
_GREETING_S = 5.0


@dataclass(kw_only=True)
class _Greeting:
    """A connection that has not yet proven that it belongs to the job."""

    sock: socket.socket
    handshake: Handshake
    due_s: float


class Door:
    """`admit(name, socket)` takes a proven connection, or returns why not; `log_refusal` hears of the others."""

    def __init__(
        self,
        loop: EventLoop,
        listener: socket.socket,
        handshake: Callable[[], Handshake],
        admit: Callable[[str, socket.socket], str | None],
        log_refusal: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._new_handshake = handshake
        self._admit = admit
        self._log_refusal = log_refusal
        self._by_fd: dict[int, _Greeting] = {}
        self._crowded = False
        loop.register(listener, lambda _events: self._on_connection())

    def next_deadline_s(self) -> float | None:
        return min((greeting.due_s for greeting in self._by_fd.values()), default=None)

    def on_tick(self, now: float) -> None:
        for greeting in [g for g in self._by_fd.values() if g.due_s <= now]:
            self._turn_away(greeting, "it did not finish the handshake in time")

    def close(self) -> None:
        for greeting in self._by_fd.values():
            greeting.sock.close()
        self._listener.close()

    def _on_connection(self) -> None:
        sock = accept(self._listener)
        if sock is None:
            return
        if sock.family == socket.AF_UNIX and peer_uid(sock) != os.getuid():
            sock.close()
            return
        greeting = _Greeting(sock=sock, handshake=self._new_handshake(), due_s=time.monotonic() + _GREETING_S)
        self._by_fd[sock.fileno()] = greeting
        self._loop.register(sock, lambda _events: self._on_bytes(greeting))
        if len(self._by_fd) >= _GREETINGS_MAX:
            # The next wait in the kernel's queue: a worker on which the door is closed does not come again.
            self._crowded = True
            self._loop.unregister(self._listener)

    def _on_bytes(self, greeting: _Greeting) -> None:
        try:
            # No more than it wants: what follows belongs to the channel, descriptors included.
            data = greeting.sock.recv(greeting.handshake.wants())
            if not data:
                raise ConnectionError("it closed the connection during the handshake")
            greeting.handshake.receive(data)
            greeting.sock.sendall(greeting.handshake.bytes_to_send())
        except BlockingIOError:
            return
        except Exception as error:  # noqa: BLE001 - whatever a stranger's bytes bring about ends its connection only
            self._turn_away(greeting, str(error))
            return
        if not greeting.handshake.done:
            return
        self._forget(greeting)
        refusal = self._admit(greeting.handshake.peer, greeting.sock)
        if refusal is not None:
            self._log_refusal(refusal)
            greeting.sock.close()

    def _turn_away(self, greeting: _Greeting, reason: str) -> None:
        self._log_refusal(reason)
        self._forget(greeting)
        try:
            greeting.sock.send(greeting.handshake.bytes_to_send())
        except OSError:
            pass  # it need not hear why
        greeting.sock.close()

    def _forget(self, greeting: _Greeting) -> None:
        del self._by_fd[greeting.sock.fileno()]
        self._loop.unregister(greeting.sock)
        if self._crowded:
            self._crowded = False
            self._loop.register(self._listener, lambda _events: self._on_connection())


def workers_handshake(secret: bytes, job: str) -> Handshake:
    return Handshake(Role.ACCEPT, secret=secret, job=job, me="agent")


def listen_abstract(name: str) -> socket.socket:
    """Raises ConfigError if the name is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind("\0" + name)
    except OSError:
        listener.close()
        raise ConfigError(f"a job of this name already runs here ({name}): choose another --rdzv-id") from None
    listener.listen(128)
    return listener


def accept(listener: socket.socket) -> socket.socket | None:
    """A new connection, non-blocking; None if it went away before it was served."""
    try:
        sock, _ = listener.accept()
    except OSError:
        return None
    sock.setblocking(False)
    return sock
