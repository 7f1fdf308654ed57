"""Packing is used where it pays, changes no byte, and a packed piece that was damaged is noticed."""

from __future__ import annotations

import os

import pytest

from elastrain.offload.drives.compression import SAMPLE_EVERY_PIECES, Codec, Sample, pays
from elastrain.offload.drives.device import Device
from elastrain.offload.drives.host_buffers import lease
from elastrain.offload.drives.port import PAGE_BYTES
from elastrain.offload.errors import SpillReadError
from tests.support.faulty_engines import EngineFaults, FaultyEngine, ThrottledEngine
from tests.support.memory_engine import MemoryEngine

SIZE = 64 * PAGE_BYTES
SAMPLE = Sample(plain_bytes=1 << 20, packed_bytes=1 << 18, pack_s=1e-3, unpack_s=5e-4)


@pytest.mark.parametrize(
    ("drive_bytes_per_s", "idle_cores", "wanted", "word"),
    [
        (1e9, 1.0, True, "and takes 1.50 ms: packed"),  # 0.79 M fewer bytes, there and back: 1.57 ms
        (1.1e9, 1.0, False, "not packed"),
        (1e8, 0.5, False, "no core is idle"),
    ],
)
def test_packing_pays_where_the_drive_is_spared_more_than_an_idle_core_spends(
    drive_bytes_per_s: float, idle_cores: float, wanted: bool, word: str
) -> None:
    decided, reason = pays(SAMPLE, drive_bytes_per_s=drive_bytes_per_s, idle_cores=idle_cores)
    assert decided is wanted
    assert word in reason


def slow(bytes_per_s: float = 1e8) -> ThrottledEngine:
    engine = ThrottledEngine(MemoryEngine(), bytes_per_s=bytes_per_s)
    engine.reserve(4 * SIZE)
    return engine


def pages(data: bytes) -> list[memoryview]:
    return [memoryview(bytearray(data[:PAGE_BYTES])), memoryview(bytearray(data[PAGE_BYTES:]))]


@pytest.mark.parametrize(("data", "packed"), [(bytes(SIZE), True), (os.urandom(SIZE), False)], ids=["zeros", "noise"])
def test_each_class_is_measured_and_comes_back_as_it_was(data: bytes, packed: bool) -> None:
    codec = Codec(slow(1e6), idle_cores=lambda: 2.0)  # packing zeros pays on a busy machine, too
    told = [codec.write(0, pages(data), "float32 ReLU") for _ in range(3)]
    assert bool(told[-1]) is packed
    assert ("float32 ReLU" in codec.reasons) and ("not packed" in codec.reasons["float32 ReLU"]) is not packed
    back = pages(b"\1" * SIZE)
    codec.read(0, back, told[-1])
    assert b"".join(back) == data
    assert (codec.written_bytes < 3 * SIZE) is packed
    assert codec.write(0, pages(data), None) == 0, "what has no class is never packed"


def test_a_class_that_stops_paying_is_written_as_it_is_again() -> None:
    idle = [2.0]
    codec = Codec(slow(1e7), idle_cores=lambda: idle[0])  # so slow that packing two pages pays on a busy machine, too
    zeros = [memoryview(bytearray(PAGE_BYTES * 2))]
    for _ in range(3):
        packed = codec.write(0, zeros, "bool Dropout")
    assert packed
    idle[0] = 0.0
    for _ in range(SAMPLE_EVERY_PIECES + 1):
        packed = codec.write(0, zeros, "bool Dropout")
    assert not packed
    assert "no core is idle" in codec.reasons["bool Dropout"]


@pytest.mark.parametrize("flips_after", [None, 0])
def test_a_device_packs_checks_and_tells(flips_after: int | None) -> None:
    # So slow that packing pays on a busy machine, too.
    engine = FaultyEngine(ThrottledEngine(MemoryEngine(), bytes_per_s=1e7), EngineFaults(flips_after=flips_after))
    device = Device(engine, threads=0, idle_cores=lambda: 2.0)
    payload = memoryview(bytearray(os.urandom(90_000) + bytes(90_000)))
    for _ in range(3):
        copy = device.write(payload, 64, lambda: False, kind="float32 GELU")
    assert all(copy.packed_bytes)
    assert device.stats().written_bytes < 3 * payload.nbytes
    assert device.stats().packing[0].startswith("float32 GELU: packed to 0.5")
    memory = lease(size_bytes=payload.nbytes, shift_bytes=64)
    if flips_after is None:
        device.read(copy, memory.image, lambda: False)
        assert memory.image[64 : 64 + payload.nbytes] == payload
    else:
        with pytest.raises(SpillReadError, match="compute the micro-batch again"):
            device.read(copy, memory.image, lambda: False)
