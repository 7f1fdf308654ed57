"""The agent's door: who comes in a rush waits for its turn."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from elastrain.base.event_loop import EventLoop
from elastrain.comm.errors import HandshakeRefused
from elastrain.comm.wire.handshake import dial
from elastrain.launcher.nodes import door
from elastrain.launcher.nodes.door import listen_abstract, open_door, workers_handshake

SECRET = b"s" * 32


@contextmanager
def _open_door() -> Iterator[tuple[EventLoop, str, list[str]]]:
    loop, name, admitted, kept = EventLoop(), f"elastrain-test/{os.getpid()}/{time.monotonic_ns()}", [], []

    def admit(member: str, sock: socket.socket) -> None:
        admitted.append(member)
        kept.append(sock)

    made = open_door(loop, listen_abstract(name), lambda: workers_handshake(SECRET, "job"), admit, lambda reason: None)
    try:
        yield loop, name, admitted
    finally:
        made.close()
        loop.close()
        for sock in kept:
            sock.close()


def _call(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect("\0" + name)
    return sock


def test_a_worker_that_is_not_let_in_hears_why() -> None:
    loop, name = EventLoop(), f"elastrain-test/{os.getpid()}/{time.monotonic_ns()}"
    refused: list[str] = []
    handshake = lambda: workers_handshake(SECRET, "job", lambda member: f"{member} is taken")  # noqa: E731
    made = open_door(loop, listen_abstract(name), handshake, lambda member, sock: None, refused.append)
    with _call(name) as sock, ThreadPoolExecutor(1) as threads:
        greeting = threads.submit(dial, sock, secret=SECRET, job="job", me="m0", timeout_s=20)
        while not refused:
            loop.turn(time.monotonic() + 0.1)
        with pytest.raises(HandshakeRefused, match="the other end says: m0 is taken"):
            greeting.result(5)
    made.close()
    loop.close()


def test_workers_that_come_while_the_door_is_crowded_are_all_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The door was closed on whoever came when it was full; a worker greets once, and ended."""
    monkeypatch.setattr(door, "_GREETINGS_MAX", 2)
    with _open_door() as (loop, name, admitted), ThreadPoolExecutor(5) as threads:
        silent = [_call(name) for _ in range(2)]
        loop.turn(time.monotonic() + 5)
        loop.turn(time.monotonic() + 0.1)
        callers = [_call(name) for _ in range(5)]
        greetings = [
            threads.submit(dial, sock, secret=SECRET, job="job", me=f"m{number}", timeout_s=20)
            for number, sock in enumerate(callers)
        ]
        for sock in silent:
            sock.close()
        until_s = time.monotonic() + 20
        while len(admitted) < 5 and time.monotonic() < until_s:
            loop.turn(time.monotonic() + 0.1)
        assert sorted(admitted) == [f"m{number}" for number in range(5)]
        for greeting in greetings:
            greeting.result(5)
        for sock in callers:
            sock.close()
