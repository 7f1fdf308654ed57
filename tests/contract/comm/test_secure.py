"""TCP connections after the handshake: what is changed, repeated, cut off or put in on the way is never heard."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from elastrain.comm.errors import HandshakeRefused, Timeout
from elastrain.comm.wire.handshake import Handshake, Role, run
from elastrain.comm.wire.secure import SecureSocket, dial

WAIT_S = 10.0
SECRET = b"s" * 32
_RECORD_HEAD = struct.Struct("<I")
_TAG_BYTES = 16


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        return dialled, listener.accept()[0]


def _handshakes(secret: bytes = SECRET) -> tuple[Handshake, Handshake]:
    dialler = Handshake(Role.DIAL, secret=secret, job="job", me="a", expect="b")
    return dialler, Handshake(Role.ACCEPT, secret=SECRET, job="job", me="b")


def _introduce(left: socket.socket, right: socket.socket, hands: tuple[Handshake, Handshake]) -> None:
    thread = threading.Thread(target=run, args=(left, hands[0], WAIT_S))
    thread.start()
    run(right, hands[1], WAIT_S)
    thread.join()


def _establish(*ends: SecureSocket) -> None:
    left, until_s = list(ends), time.monotonic() + WAIT_S
    while left:
        assert time.monotonic() < until_s
        left = [end for end in left if not end.establish()]
        if left:
            select.select(left, [], [], 0.1)


@contextmanager
def _secured() -> Iterator[tuple[SecureSocket, SecureSocket, socket.socket, socket.socket]]:
    """Both ends, and the raw sockets below them."""
    left, right = _tcp_pair()
    hands = _handshakes()
    with left, right:
        _introduce(left, right, hands)
        a, b = SecureSocket(left, hands[0]), SecureSocket(right, hands[1])
        _establish(a, b)
        yield a, b, left, right


def _receive(end: SecureSocket, size_bytes: int) -> bytes:
    came, until_s = b"", time.monotonic() + WAIT_S
    while len(came) < size_bytes:
        assert time.monotonic() < until_s
        try:
            came += end.recv(size_bytes - len(came))
        except BlockingIOError:
            select.select([end], [], [], 0.1)
    return came


def _sealed(end: SecureSocket, raw: socket.socket, *messages: bytes) -> list[bytes]:
    """What `end` would put on the wire for each message, taken from the other side's raw socket."""
    records = []
    for message in messages:
        assert end.send(message) == len(message)
        head = raw.recv(_RECORD_HEAD.size, socket.MSG_WAITALL)
        records.append(head + raw.recv(_RECORD_HEAD.unpack(head)[0] + _TAG_BYTES, socket.MSG_WAITALL))
    return records


def test_bytes_arrive_in_order_both_ways_and_are_not_to_be_read_on_the_way() -> None:
    with _secured() as (a, b, _, raw):
        raw.setblocking(True)
        (record,) = _sealed(a, raw, b"gradient" * 4)
        assert b"gradient" not in record
        assert b.send(b"pong") == 4 and _receive(a, 4) == b"pong"


def test_a_large_message_waits_for_its_reader_and_is_reported_sent_only_when_the_kernel_has_it() -> None:
    message = bytes(range(256)) * 80_000
    with _secured() as (a, b, _, _):
        came, rest = bytearray(), memoryview(message)
        until_s = time.monotonic() + WAIT_S
        while len(came) < len(message):
            assert time.monotonic() < until_s
            try:
                rest = rest[a.sendmsg([rest[:100_000], rest[100_000:]]) :] if rest else rest
            except BlockingIOError:
                pass
            try:
                came += b.recv(70_000)
            except BlockingIOError:
                select.select([b], [], [], 0.1)
        assert bytes(came) == message and not rest


def test_what_was_read_from_the_kernel_and_not_taken_yet_is_known() -> None:
    with _secured() as (a, b, _, _):
        a.send(b"x" * 30_000)
        assert _receive(b, 10) and b.holds_more
        assert len(_receive(b, 29_990)) == 29_990
        with pytest.raises(BlockingIOError):
            b.recv(1)
        assert not b.holds_more


def _changed(record: bytes) -> bytes:
    return record[:-1] + bytes([record[-1] ^ 1])


ATTACKS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "altered": lambda records: [_changed(records[0])],
    "repeated": lambda records: [records[0], records[0]],
    "left out": lambda records: records[1:],
    "in another order": lambda records: records[::-1],
    "put in": lambda records: [_RECORD_HEAD.pack(24) + bytes(40), *records],
    "no record at all": lambda records: [b"GET / HTTP/1.1\r\n\r\n" * 3],
    "too long": lambda records: [_RECORD_HEAD.pack(0xFFFF_FFFF) + bytes(0xFFFF)],
    "empty": lambda records: [_RECORD_HEAD.pack(0) + bytes(_TAG_BYTES), *records],
    "with another length": lambda records: [_RECORD_HEAD.pack(2) + records[0][_RECORD_HEAD.size :]],
    "of the other direction": lambda records: [],  # filled in below
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_records_that_were_tampered_with_end_the_connection_unheard(attack: str) -> None:
    with _secured() as (a, b, left, right):
        right.setblocking(True)
        records = _sealed(a, right, b"one", b"two", b"three")
        sent = ATTACKS[attack](records)
        if attack == "of the other direction":
            b_says = _sealed_by(b, left)
            sent = [b_says]
        # The attacker writes into the stream that b reads: the raw socket of a's side.
        left.setblocking(True)
        left.sendall(b"".join(sent))
        right.setblocking(False)
        assert _everything(b) == (b"one" if attack == "repeated" else b"")


def _sealed_by(end: SecureSocket, raw: socket.socket) -> bytes:
    raw.setblocking(True)
    return _sealed(end, raw, b"three")[0]


def _everything(end: SecureSocket) -> bytes:
    """What is heard until the connection ends by an error; fails if it does not."""
    came, until_s = b"", time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        try:
            came += end.recv(100)
        except BlockingIOError:
            select.select([end], [], [], 0.1)
        except ConnectionAbortedError:
            return came
    raise AssertionError(f"the connection still stands; it said {came!r}")


def test_a_connection_cut_off_within_a_record_ends_without_the_record() -> None:
    with _secured() as (a, b, left, right):
        right.setblocking(True)
        (record,) = _sealed(a, right, b"one")
        right.setblocking(False)
        left.setblocking(True)
        left.sendall(record[:-1])
        left.shutdown(socket.SHUT_WR)
        select.select([b], [], [], WAIT_S)
        assert b.recv(100) == b""


def test_records_of_an_earlier_connection_are_worth_nothing_in_another() -> None:
    with _secured() as (a, _, _, right), _secured() as (_, b, left, _):
        right.setblocking(True)
        left.setblocking(True)
        left.sendall(_sealed(a, right, b"one")[0])
        assert _everything(b) == b""


def test_who_stands_between_with_keys_of_its_own_is_refused_by_both() -> None:
    """The handshake is passed on untouched; then it makes a connection with each end."""
    with _between() as (a, b, to_a, to_b):
        for end, middle in ((a, to_a), (b, to_b)):
            with pytest.raises(HandshakeRefused, match="stands between"):
                _establish(end, middle)


@contextmanager
def _between() -> Iterator[tuple[SecureSocket, SecureSocket, SecureSocket, SecureSocket]]:
    """Both ends, and the sockets that who stands between has to each: it knows no secret, and guesses a key."""
    left, left_far = _tcp_pair()
    right_far, right = _tcp_pair()
    hands = _handshakes()
    with left, left_far, right_far, right:
        pump = threading.Thread(target=_relay, args=(left_far, right_far, hands))
        pump.start()
        _introduce(left, right, hands)
        pump.join()
        guessed = _Guessed(Role.ACCEPT), _Guessed(Role.DIAL)
        yield (
            SecureSocket(left, hands[0]),
            SecureSocket(right, hands[1]),
            SecureSocket(left_far, guessed[0]),  # type: ignore[arg-type]
            SecureSocket(right_far, guessed[1]),  # type: ignore[arg-type]
        )


class _Guessed:
    def __init__(self, role: Role) -> None:
        self.role = role

    def session_key(self) -> bytes:
        return b"k" * 32


def _relay(one: socket.socket, other: socket.socket, hands: tuple[Handshake, Handshake]) -> None:
    while not all(hand.done for hand in hands):
        for source, sink in ((one, other), (other, one)):
            if select.select([source], [], [], 0.02)[0]:
                sink.sendall(source.recv(1024))


def test_a_dialler_that_waits_gets_a_connection_or_an_error_in_time() -> None:
    left, right = _tcp_pair()
    hands = _handshakes()
    with left, right:
        answers = threading.Thread(target=run, args=(right, hands[1], WAIT_S))
        answers.start()
        with pytest.raises(Timeout, match=r"no encrypted connection came about within 0\.3 s"):
            dial(left, hands[0], 0.3)
        answers.join()


def test_a_dialler_that_waits_hears_that_the_other_end_went() -> None:
    left, right = _tcp_pair()
    hands = _handshakes()

    def answer_and_go() -> None:
        run(right, hands[1], WAIT_S)
        right.close()

    with left, right:
        answers = threading.Thread(target=answer_and_go)
        answers.start()
        with pytest.raises(HandshakeRefused):
            dial(left, hands[0], WAIT_S)
        answers.join()


def test_what_came_before_a_connection_broke_is_heard_first() -> None:
    with _secured() as (a, b, left, _):
        b.send(b"never read")  # so that the kernel resets the connection
        a.send(b"farewell")
        time.sleep(0.05)
        left.close()
        assert _receive(b, 8) == b"farewell"
        with pytest.raises(ConnectionResetError):
            _receive(b, 1)


def test_the_rest_of_a_long_read_does_not_lose_what_came_before_the_break() -> None:
    with _secured() as (a, b, left, _):
        b.send(b"never read")
        a.send(b"farewell")
        time.sleep(0.05)
        left.close()
        assert b.recv(1000) == b"farewell"
        with pytest.raises(ConnectionResetError):
            b.recv(1000)
