"""The agent's end of the operator's socket: one request and one answer per connection.

`operator_messages` is the other end.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from elastrain.base.event_loop import EventLoop
from elastrain.launcher.nodes.door import accept
from elastrain.launcher.shared.line_socket import LineSocket, peer_uid
from elastrain.launcher.shared.operator_messages import ANSWER, REQUEST, Answer, Request
from elastrain.protocol.codec import BadMessageError


class ControlServer:
    """Server for the operator's requests. It calls `answer` with each request, in the agent's loop."""

    def __init__(self, loop: EventLoop, listener: socket.socket, answer: Callable[[Request], Answer]) -> None:
        self._loop = loop
        self._listener = listener
        self._answer = answer
        self._open: set[LineSocket] = set()
        loop.register(listener, lambda _events: self._on_connection())

    def close(self) -> None:
        """Close the listener and all connections."""
        for channel in self._open:
            channel.close()
        self._listener.close()

    def _on_connection(self) -> None:
        sock = accept(self._listener)
        if sock is None:
            return
        if peer_uid(sock) not in (os.getuid(), 0):
            sock.close()
            return
        channel = LineSocket(sock)
        self._open.add(channel)
        self._loop.register(sock, lambda _events: self._on_request(channel))

    def _on_request(self, channel: LineSocket) -> None:
        try:
            received = channel.receive()
            answers = [self._answer(REQUEST.decode(line)) for line in received.lines]
            over = received.closed or bool(answers)
        except BadMessageError as problem:
            answers, over = [Answer(ok=False, sentence=f"the request is not understood: {problem}")], True
        for answer in answers:
            channel.send(ANSWER.encode(answer))
        if over:
            self._loop.unregister(channel.sock)
            self._open.discard(channel)
            channel.close()
