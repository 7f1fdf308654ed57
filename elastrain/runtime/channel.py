"""The worker's end of its agent's channel: typed messages both ways, over a UNIX socket with a handshake.

The agent's end is `launcher.line_socket`. They stay two: a worker may wait for its agent, and any of its threads may
send; an agent never waits for a worker, and takes descriptors. What both do alike is `base.line_buffer`.
"""

from __future__ import annotations

import os
import socket
import threading

from elastrain.agent_messages import FROM_WORKER, TO_WORKER, FromWorker, ToWorker
from elastrain.base.environment import Environment
from elastrain.base.line_buffer import LineBuffer
from elastrain.codec import LINE_BYTES_MAX
from elastrain.comm.errors import HandshakeRefused
from elastrain.comm.wire.handshake import dial
from elastrain.errors import RefusedError

CONNECT_TIMEOUT_S = 20.0
SEND_TIMEOUT_S = 20.0


class ChannelClosedError(ConnectionError):
    """The agent is gone, or says what no agent says."""


class Channel:
    """Sending is thread-safe; receiving belongs to one thread."""

    def __init__(self, address: str, *, secret: bytes | None, job: str, member: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_TIMEOUT_S)
        self._socket.connect("\0" + address)
        dial(self._socket, secret=secret, job=job, me=member, timeout_s=CONNECT_TIMEOUT_S)
        self._socket.settimeout(SEND_TIMEOUT_S)
        self._lock = threading.Lock()
        self._lines = LineBuffer(LINE_BYTES_MAX)
        os.register_at_fork(after_in_child=self._after_fork)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: FromWorker, *, fd: int | None = None) -> None:
        """Send one message; `fd` travels beside it. Raises ChannelClosedError."""
        line = FROM_WORKER.encode(message)
        with self._lock:
            try:
                if fd is not None:
                    sent = socket.send_fds(self._socket, [line], [fd])
                    line = line[sent:]
                self._socket.sendall(line)
            except OSError as error:
                raise ChannelClosedError(f"the agent does not answer: {error}") from error

    def receive(self) -> list[ToWorker]:
        """Return all messages that are there, without waiting. Raises ChannelClosedError when the agent is gone."""
        try:
            data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelClosedError(f"the agent does not answer: {error}") from error
        if not data:
            raise ChannelClosedError("the agent has closed the channel")
        try:
            return [TO_WORKER.decode(line) for line in self._lines.feed(data)]
        except ValueError as error:
            raise ChannelClosedError(f"the agent sent what no agent sends: {error}") from error

    def close(self) -> None:
        self._socket.close()

    def _after_fork(self) -> None:
        """A data loader must not keep the agent believing that its worker lives."""
        if self._socket.fileno() >= 0:
            os.close(self._socket.detach())


def connect(environment: Environment) -> Channel | None:
    """The channel to this worker's agent; None without a launcher. Raises ConnectionError, RefusedError."""
    if environment.agent is None:
        return None
    try:
        secret, job, me = environment.secret, environment.scope, environment.member
        return Channel(environment.agent, secret=secret, job=job, member=me)
    except HandshakeRefused as refused:
        raise RefusedError(refused.reason) from None
