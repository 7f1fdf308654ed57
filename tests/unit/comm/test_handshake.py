"""comm/wire/handshake.py: the state machine by itself, and over real socket pairs."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from elastrain.comm.errors import CommError, HandshakeRefused, Timeout
from elastrain.comm.wire import handshake as hs

SECRET = b"k" * 32


def _pair(
    *,
    dial_secret: bytes | None = SECRET,
    accept_secret: bytes | None = SECRET,
    dial_job: str = "job",
    expect: str | None = None,
) -> tuple[hs.Handshake, hs.Handshake]:
    dialer = hs.Handshake(hs.Role.DIAL, secret=dial_secret, job=dial_job, me="a", generation=3, expect=expect)
    acceptor = hs.Handshake(hs.Role.ACCEPT, secret=accept_secret, job="job", me="b", generation=5)
    return dialer, acceptor


def _exchange(one: hs.Handshake, other: hs.Handshake, pass_on: Callable[[bytes], bytes] = lambda data: data) -> int:
    """Carry bytes both ways until nothing is left to say; returns how many went over the wire."""
    carried = 0
    wires = {one: bytearray(), other: bytearray()}
    while True:
        wires[other] += pass_on(one.bytes_to_send())
        wires[one] += pass_on(other.bytes_to_send())
        if not wires[one] and not wires[other]:
            return carried
        for end, wire in wires.items():
            wanted = end.wants()
            assert wanted or not wire
            end.receive(bytes(wire[:wanted]))
            carried += len(wire[:wanted])
            del wire[:wanted]


def test_both_ends_learn_name_and_generation_within_1_kib() -> None:
    dialer, acceptor = _pair()
    assert _exchange(dialer, acceptor) <= 1024
    assert dialer.done and acceptor.done
    assert (dialer.peer, dialer.peer_generation) == ("b", 5)
    assert (acceptor.peer, acceptor.peer_generation) == ("a", 3)


def test_a_missing_secret_on_both_sides_is_accepted() -> None:
    dialer, acceptor = _pair(dial_secret=None, accept_secret=None)
    _exchange(dialer, acceptor)
    assert dialer.done and acceptor.done


@pytest.mark.parametrize(("dial_secret", "accept_secret"), [(b"x" * 32, SECRET), (None, SECRET), (SECRET, None)])
def test_different_secrets_are_refused_with_a_sentence(dial_secret: bytes | None, accept_secret: bytes | None) -> None:
    with pytest.raises(HandshakeRefused, match="different secrets for job 'job': give both the same one"):
        _exchange(*_pair(dial_secret=dial_secret, accept_secret=accept_secret))


def test_another_job_is_refused_naming_both() -> None:
    with pytest.raises(HandshakeRefused, match="this is job 'job', the other end belongs to 'jab'"):
        _exchange(*_pair(dial_job="jab"))


def test_an_unexpected_member_is_refused() -> None:
    with pytest.raises(HandshakeRefused, match="'c' was expected here, 'b' answered"):
        _exchange(*_pair(expect="c"))


@pytest.mark.parametrize("position", range(0, 135, 5))
def test_any_flipped_bit_ends_in_a_refusal(position: int) -> None:
    """Names, jobs, nonces, generations and proofs are all covered."""
    seen = 0

    def flip(data: bytes) -> bytes:
        nonlocal seen
        start, seen = seen, seen + len(data)
        if start <= position < seen:
            data = data[: position - start] + bytes([data[position - start] ^ 0x40]) + data[position - start + 1 :]
        return data

    dialer, acceptor = _pair()
    with pytest.raises(HandshakeRefused):  # noqa: PT012 - a longer length leaves both waiting, which is no success
        _exchange(dialer, acceptor, flip)
        assert not (dialer.done and acceptor.done)
        raise HandshakeRefused("incomplete")


def test_an_answer_does_not_serve_as_a_proof() -> None:
    """A reflected HMAC of the other role is worth nothing."""
    dialer, acceptor = _pair()
    hello = dialer.bytes_to_send()
    for start in range(len(hello)):
        acceptor.receive(hello[start : start + 1])
    mac = acceptor.bytes_to_send()[-32:]
    proof = b"\x03\x20\x00" + mac
    acceptor.receive(proof[:3])
    with pytest.raises(HandshakeRefused, match="different secrets"):
        acceptor.receive(proof[3:])


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n", b"\x00" * 64, b"\x01\xff\xff" + b"a" * 70, b"\x04\x00\x00"])
def test_garbage_is_refused_before_more_is_read(garbage: bytes) -> None:
    acceptor = hs.Handshake(hs.Role.ACCEPT, secret=SECRET, job="job", me="b")
    with pytest.raises(HandshakeRefused, match="does not speak elastrain's handshake"):
        acceptor.receive(garbage[: acceptor.wants()])


@pytest.mark.parametrize("name", ["", "x" * 101])
def test_own_names_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 100 bytes"):
        hs.Handshake(hs.Role.DIAL, secret=None, job="job", me=name)


def _accept_beside(sock: socket.socket, secret: bytes, results: list[str | CommError]) -> threading.Thread:
    def run() -> None:
        try:
            results.append(hs.run(sock, hs.Handshake(hs.Role.ACCEPT, secret=secret, job="job", me="b"), 5))
        except CommError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_blocking_helpers_return_the_peer_and_leave_the_stream_intact() -> None:
    left, right = socket.socketpair()
    with left, right:
        results: list[str | CommError] = []
        thread = _accept_beside(right, SECRET, results)
        assert hs.dial(left, secret=SECRET, job="job", me="a", timeout_s=5, expect="b") == "b"
        thread.join(5)
        right.sendall(b"next")
        assert results == ["a"]
        assert left.recv(10) == b"next"


def test_blocking_helpers_tell_both_ends_of_a_wrong_secret() -> None:
    left, right = socket.socketpair()
    with left, right:
        results: list[str | CommError] = []
        thread = _accept_beside(right, b"other", results)
        with pytest.raises(HandshakeRefused, match="different secrets"):
            hs.dial(left, secret=SECRET, job="job", me="a", timeout_s=5)
        thread.join(5)
        (refused,) = results
        assert isinstance(refused, HandshakeRefused)
        assert "the other end says: 'a' and 'b' hold different secrets" in refused.reason


def test_a_silent_peer_ends_in_a_timeout() -> None:
    left, right = socket.socketpair()
    with left, right, pytest.raises(Timeout, match=r"within 0\.05 s"):
        hs.dial(left, secret=SECRET, job="job", me="a", timeout_s=0.05)


def test_a_peer_that_hangs_up_is_a_refusal() -> None:
    left, right = socket.socketpair()
    right.close()
    with left, pytest.raises(HandshakeRefused, match=r"broke|closed the connection"):
        hs.dial(left, secret=SECRET, job="job", me="a", timeout_s=5)
