"""The worker's line to its agent: JSON lines over an authenticated UNIX socket.

Losing it means that the launcher is gone: the worker then has nobody to tell it who is alive, and stops.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

from elastrain.comm.wire.handshake import dial

CONNECT_TIMEOUT_S = 20.0
SEND_TIMEOUT_S = 20.0
LINE_BYTES_MAX = 1 << 20


class ChannelClosedError(ConnectionError):
    """The agent is gone."""


class Channel:
    """Sending is thread-safe; receiving belongs to one thread."""

    def __init__(self, address: str, *, secret: bytes | None, job: str, member: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_TIMEOUT_S)
        self._socket.connect("\0" + address)
        dial(self._socket, secret=secret, job=job, me=member, timeout_s=CONNECT_TIMEOUT_S)
        self._socket.settimeout(SEND_TIMEOUT_S)
        self._lock = threading.Lock()
        self._buffer = b""
        os.register_at_fork(after_in_child=self._after_fork)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, *, fd: int | None = None, **fields: object) -> None:
        """One message; `fd` travels beside it. Raises ChannelClosedError."""
        line = json.dumps({"type": kind, **fields}, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            try:
                if fd is not None:
                    sent = socket.send_fds(self._socket, [line], [fd])
                    line = line[sent:]
                self._socket.sendall(line)
            except OSError as error:
                raise ChannelClosedError(f"the agent does not answer: {error}") from error

    def receive(self) -> list[Mapping[str, Any]]:
        """All messages that are there, without waiting. Raises ChannelClosedError when the agent is gone."""
        try:
            data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelClosedError(f"the agent does not answer: {error}") from error
        if not data:
            raise ChannelClosedError("the agent has closed the channel")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > LINE_BYTES_MAX:
            raise ChannelClosedError(f"the agent sent a line of more than {LINE_BYTES_MAX} bytes")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._socket.close()

    def _after_fork(self) -> None:
        """A data loader must not keep the agent believing that its worker lives."""
        if self._socket.fileno() >= 0:
            os.close(self._socket.detach())
