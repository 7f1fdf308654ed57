"""The search for a proof that nobody listens any more."""

from __future__ import annotations

import math
import secrets
import socket
import time
from collections.abc import Iterator

import pytest

from elastrain.comm.wire.addresses import Peer
from elastrain.comm.wire.link_table import Proofs


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(f"\0{secrets.token_hex(8)}")
        listening.listen()
        yield listening


def _peer(listener: socket.socket) -> Peer:
    return Peer(id="w2", address=f"unix:{listener.getsockname()[1:].decode()}", node="n0")


def _run(proofs: Proofs) -> int:
    """All questions at once; returns how many moments there were."""
    moments = 0
    while (due_s := proofs.next_due_s()) < math.inf:
        proofs.run_timers(due_s)
        moments += 1
    return moments


def test_the_end_is_found_once_the_listener_is_closed(listener: socket.socket) -> None:
    found: list[str] = []
    proofs = Proofs(found.append)
    proofs.seek(_peer(listener))
    proofs.run_timers(time.monotonic())  # its process is just ending
    assert not found
    listener.close()
    assert _run(proofs) == 1
    assert found == ["w2"]


def test_a_peer_that_listens_is_asked_six_times_within_a_second(listener: socket.socket) -> None:
    found: list[str] = []
    proofs = Proofs(found.append)
    proofs.seek(_peer(listener))
    began_s = proofs.next_due_s()
    ended_s = began_s
    while (due_s := proofs.next_due_s()) < math.inf:
        ended_s = due_s
        proofs.run_timers(due_s)
    assert not found
    assert 0.3 < ended_s - began_s < 0.32


def test_nothing_is_asked_of_a_member_that_was_dropped_or_listens_in_the_network(listener: socket.socket) -> None:
    found: list[str] = []
    proofs = Proofs(found.append)
    peer = _peer(listener)
    proofs.seek(peer)
    proofs.drop(peer.id)
    proofs.seek(Peer(id="w3", address="tcp:127.0.0.1:1", node="n0"))
    listener.close()
    assert _run(proofs) == 0
    assert not found
