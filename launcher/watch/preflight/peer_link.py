"""Latency and bandwidth between two machines, over a link as a job makes it: the proof of the secret, then encrypted.

`elastrain doctor --listen PORT` serves on one machine; `elastrain doctor --peers HOST:PORT` measures from another.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from elastrain.comm.errors import CommError
from elastrain.comm.wire.acceptor import Introduction
from elastrain.comm.wire.handshake import Handshake, Role
from elastrain.comm.wire.secure import BlockingStream
from elastrain.launcher.watch.preflight.check import StartCheck, judged
from elastrain.launcher.watch.preflight.host_checks import clock_against
from elastrain.launcher.watch.preflight.machine_facts import Facts, compared
from elastrain.launcher.watch.words import duration, size

_JOB, _SERVER = "elastrain doctor", "doctor"
_TIMEOUT_S = 20.0
_ROUNDS = 50
_CHUNK_BYTES, _SENT_BYTES = 1 << 20, 64 << 20
_HEAD = struct.Struct("<I")
_TOLD_BYTES_MAX = 64 << 10
_SLOW_LATENCY_S, _SLOW_BYTES_PER_S = 0.005, 100e6


def measured(who: str, latency_s: float, bytes_per_s: float) -> StartCheck:
    """Judge a link."""
    return judged(
        f"link to {who}",
        f"{duration(latency_s)} there and back, {size(bytes_per_s)}/s",
        warns=latency_s > _SLOW_LATENCY_S or bytes_per_s < _SLOW_BYTES_PER_S,
        advice="check that the address belongs to the fast network (--local-addr, --interface)",
    )


def look(peer: tuple[str, int], secret: bytes, mine: Facts) -> list[StartCheck]:
    """Measure the link to a peer, and compare clocks and facts."""
    who = f"{peer[0]}:{peer[1]}"
    try:
        with socket.create_connection(peer, timeout=_TIMEOUT_S) as sock:
            stream = _introduced(sock, Handshake(Role.DIAL, secret=secret, job=_JOB, me="asker", expect=_SERVER))
            latency_s = _latency_s(stream)
            bytes_per_s = _bytes_per_s(stream)
            sent_s = time.time()
            _tell(stream, {"ask": "facts"})
            told = _told(stream)
            ahead_s = float(told["wall"]) - (sent_s + time.time()) / 2
            theirs = {str(name): str(value) for name, value in dict(told["facts"]).items()}
    except (OSError, EOFError, CommError, ValueError, KeyError, TypeError) as error:
        advice = "start `elastrain doctor --listen PORT` there, with the same --secret-file"
        return [judged(f"link to {who}", str(error) or type(error).__name__, stops=True, advice=advice)]
    return [measured(who, latency_s, bytes_per_s), clock_against(who, ahead_s), compared(who, mine, theirs)]


def serve(listener: socket.socket, secret: bytes, mine: Facts, say: Callable[[str], None]) -> None:
    """Answer one peer after the other, until the process is ended. A peer that misbehaves is told and left."""
    while True:
        sock, address = listener.accept()
        with sock:
            try:
                _answer(_introduced(sock, Handshake(Role.ACCEPT, secret=secret, job=_JOB, me=_SERVER)), mine)
                say(f"{address[0]} has measured the link")
            except (OSError, EOFError, CommError, ValueError, KeyError) as error:
                say(f"{address[0]}: {error}")


def _introduced(sock: socket.socket, handshake: Handshake) -> BlockingStream:
    """Return the link after the handshake and the exchange of keys. Raises HandshakeRefused, OSError."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    introduction = Introduction(sock, handshake, time.monotonic() + _TIMEOUT_S)
    while not introduction.advance():
        left_s = introduction.deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([sock], [], [], left_s)[0]:
            raise TimeoutError(f"the handshake was not finished within {_TIMEOUT_S:g} s")
    return BlockingStream(introduction.connection, _TIMEOUT_S)


def _answer(stream: BlockingStream, mine: Facts) -> None:
    while True:
        try:
            asked = _told(stream)
        except EOFError:
            return
        if asked["ask"] == "bytes":
            into = memoryview(bytearray(_CHUNK_BYTES))
            for _ in range(_SENT_BYTES // _CHUNK_BYTES):
                stream.receive_into(into)
        _tell(stream, {"wall": time.time(), "facts": mine if asked["ask"] == "facts" else {}})


def _latency_s(stream: BlockingStream) -> float:
    took_s = []
    for _ in range(_ROUNDS):
        begin_s = time.monotonic()
        _tell(stream, {"ask": "echo"})
        _told(stream)
        took_s.append(time.monotonic() - begin_s)
    return median(took_s)


def _bytes_per_s(stream: BlockingStream) -> float:
    data = memoryview(bytes(_CHUNK_BYTES))
    begin_s = time.monotonic()
    _tell(stream, {"ask": "bytes"})
    for _ in range(_SENT_BYTES // _CHUNK_BYTES):
        stream.send(data)
    _told(stream)
    return _SENT_BYTES / (time.monotonic() - begin_s)


def _tell(stream: BlockingStream, value: Mapping[str, object]) -> None:
    text = json.dumps(value).encode()
    stream.send(_HEAD.pack(len(text)) + text)


def _told(stream: BlockingStream) -> dict[str, Any]:
    (length,) = _HEAD.unpack(stream.receive(_HEAD.size))
    if length > _TOLD_BYTES_MAX:
        raise ValueError(f"a message of {length} bytes is none of ours")
    value = json.loads(stream.receive(length))
    if not isinstance(value, dict):
        raise ValueError("the message is no object")
    return value
