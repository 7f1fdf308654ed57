"""The rate at which a stream's large frames come in: their first bytes, and small frames, say nothing."""

from __future__ import annotations

import socket

import pytest
import torch

from elastrain.comm.shm.segments import SharedMemory
from elastrain.comm.wire import stream as streams
from elastrain.comm.wire.addresses import Peer
from elastrain.comm.wire.frames import Caps, Inline, encode, tensor_bytes
from elastrain.comm.wire.link import Link
from elastrain.comm.wire.link_table import LinkTable
from elastrain.comm.wire.stream import Outbox, Stream

CHUNK = 32 << 10


def frame(size_bytes: int) -> bytes:
    tensor = torch.zeros(size_bytes, dtype=torch.uint8)
    told = Inline(dtype=tensor.dtype, shape=tuple(tensor.shape))
    return encode(kind=1, generation=1, body=b"", tensors=[told]) + bytes(tensor_bytes(tensor))


def received(monkeypatch: pytest.MonkeyPatch, data: bytes, *, burst: int = 0) -> tuple[int, float]:
    """Let `burst` bytes come at once, then a chunk each second."""
    now_s = [0.0]
    monkeypatch.setattr(streams.time, "monotonic", lambda: now_s[0])
    mine, other = socket.socketpair()
    with mine, other:
        mine.setblocking(False)
        stream, found, begin = Stream(mine, Outbox(), Caps()), 0, 0
        while begin < len(data):
            end = begin + (CHUNK if begin else burst or CHUNK)
            other.sendall(data[begin:end])
            found += len(stream.pull())
            begin, now_s[0] = end, now_s[0] + 1.0
        assert found >= 1
        return stream.take_timed()


@pytest.mark.parametrize("burst", [0, 3 * CHUNK])
def test_a_large_frame_is_timed_after_its_first_bytes(monkeypatch: pytest.MonkeyPatch, burst: int) -> None:
    size_bytes, seconds = received(monkeypatch, frame(40 * CHUNK), burst=burst)
    assert size_bytes / seconds == pytest.approx(CHUNK, rel=0.05)


def test_frames_that_come_at_once_or_are_small_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert received(monkeypatch, frame(2 * CHUNK)) == (0, 0.0)
    assert received(monkeypatch, frame(100) * 9) == (0, 0.0)


def test_what_was_taken_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "take_timed", lambda self, take=Stream.take_timed: (take(self), take(self))[1])
    assert received(monkeypatch, frame(40 * CHUNK)) == (0, 0.0)


def test_a_link_is_busy_while_the_kernel_has_much_to_send() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        other, _ = server.accept()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        mine.setblocking(False)
        outbox = Outbox()
        stream = Stream(mine, outbox, Caps())
        link = Link(Peer(id="b", node="n", address=""), same_host=False, memory=SharedMemory(1 << 20))
        link.stream, link.outbox = stream, outbox
        table = LinkTable("a", "n")
        table.by_member["b"] = link
        assert table.busy() == frozenset()
        outbox.push(bytes(8 << 20))
        assert not stream.flush(), "nobody reads"
        assert table.busy() == {"b"}
        outbox.clear()
        assert stream.unsent_bytes > 512 << 10
        assert table.busy() == {"b"}, "what the kernel has taken waits, too"
        other.close()
