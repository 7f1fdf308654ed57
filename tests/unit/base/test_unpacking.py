"""What is packed unpacks into as many bytes as are due, or into none: a bomb takes no memory."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
import xxhash
import zstandard
from msgspec.structs import replace

from elastrain.base.line_files import unpacked
from elastrain.offload.drives.compression import Codec
from elastrain.offload.drives.port import PAGE_BYTES
from elastrain.snapshot.durable import state_file
from elastrain.snapshot.durable.errors import DamagedError
from tests.support.decoders import BytesFile
from tests.support.memory_engine import MemoryEngine

BOMB_BYTES = 256 << 20
DUE_BYTES = 1 << 20
BOUND_BYTES = 8 * DUE_BYTES


def bomb(*, stated: bool) -> bytes:
    """A few kilobytes that unpack into a quarter of a gigabyte of zeros."""
    packer = zstandard.ZstdCompressor(write_content_size=stated).compressobj(size=BOMB_BYTES if stated else -1)
    chunk = bytes(1 << 20)
    return b"".join(packer.compress(chunk) for _ in range(BOMB_BYTES // len(chunk))) + packer.flush()


BOMBS = {"its size stated": bomb(stated=True), "no size stated": bomb(stated=False)}


@pytest.fixture(params=BOMBS.values(), ids=BOMBS)
def packed(request: pytest.FixtureRequest) -> bytes:
    made: bytes = request.param
    return made


@pytest.fixture(autouse=True)
def little_memory() -> object:
    """Whatever happens in the test, this process takes no memory for what the bomb would be."""
    tracemalloc.start()
    yield
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < BOUND_BYTES


def test_a_bomb_is_refused_before_memory_is_taken_for_it(packed: bytes) -> None:
    with pytest.raises(zstandard.ZstdError):
        unpacked(memoryview(packed), DUE_BYTES)


@pytest.mark.parametrize("stated", [True, False])
def test_what_is_of_the_size_that_is_due_is_unpacked_and_nothing_shorter(stated: bool) -> None:
    plain = b"ab" * (DUE_BYTES // 2)
    packed = zstandard.ZstdCompressor(write_content_size=stated).compress(plain)
    assert unpacked(memoryview(packed), DUE_BYTES) == plain
    with pytest.raises(zstandard.ZstdError, match="are due"):
        unpacked(memoryview(packed), DUE_BYTES + 1)


def test_a_bomb_on_a_drive_is_an_error_of_the_drive(packed: bytes) -> None:
    engine = MemoryEngine()
    engine.reserve(DUE_BYTES)
    engine.write(0, [memoryview(packed)])
    piece = [memoryview(bytearray(PAGE_BYTES))]
    with pytest.raises(OSError, match="came back changed"):
        Codec(engine, idle_cores=lambda: 2.0).read(0, piece, len(packed))


def test_a_bomb_in_a_checkpoint_with_right_checksums_is_damage(packed: bytes) -> None:
    file = BytesFile()
    part = state_file.write(file, "f", b"{}", [("uint8", memoryview(bytes(DUE_BYTES)))])
    tail = state_file.read_tail(file, part, "it")
    assert tail.frames[0].packed
    stored = packed + bytes(-len(packed) % PAGE_BYTES)
    wrong = state_file.FrameEntry(0, DUE_BYTES, len(stored), True, xxhash.xxh3_64_intdigest(stored))
    described = msgspec.msgpack.encode(state_file.Tail(tail.meta, tail.arrays, (wrong,)))
    end = len(described).to_bytes(8, "little") + described
    damaged = replace(
        part,
        size_bytes=len(stored) + len(end),
        tail_bytes=len(end),
        tail_checksum=xxhash.xxh3_64_intdigest(end),
    )
    with pytest.raises(DamagedError, match="frame 0 of it in f is damaged: it cannot be unpacked"):
        state_file.check(BytesFile(stored + end), damaged, "it")
