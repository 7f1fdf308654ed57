"""One device: copies come back, slots are given back, and every fault has its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastrain.offload.activations.hooks import ActivationOffload, OffloadConfig
from elastrain.offload.drives.device import PIECE_BYTES, CopiedInPlace, Device, EndedEarlyError, NoSpaceError
from elastrain.offload.drives.host import HostEngine
from elastrain.offload.drives.host_buffers import ROWS, bytes_of, lease, tensor_checksum
from elastrain.offload.drives.port import PAGE_BYTES, CudaEngine, IoEngine
from elastrain.offload.drives.request_queue import ASSUMED_BYTES_PER_S, DeviceTime, Meter
from elastrain.offload.drives.transfer import copied
from elastrain.offload.errors import CorruptSpillError, SpillReadError, SpillWriteError
from elastrain.offload.planning.profile import drive_writes_per_day
from tests.support.faulty_engines import EngineFaults, FaultyEngine
from tests.support.memory_engine import MemoryEngine

Make = Callable[..., Device]


def never() -> bool:
    return False


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Device] = []

    def device(
        engine: IoEngine | None = None, *, quota_bytes: int = 1 << 40, faults: EngineFaults | None = None
    ) -> Device:
        inner = engine or MemoryEngine()
        made.append(Device(FaultyEngine(inner, faults or EngineFaults()), quota_bytes=quota_bytes, threads=1))
        return made[-1]

    yield device
    for each in made:
        each.close()


def payload(size_bytes: int) -> memoryview:
    return memoryview((bytearray(range(253)) * (size_bytes // 253 + 1))[:size_bytes])


@pytest.mark.parametrize("size_bytes", [1, PAGE_BYTES, 3 * PAGE_BYTES + 17, 2 * PIECE_BYTES + 5])
@pytest.mark.parametrize("shift_bytes", [0, 64, PAGE_BYTES - 1])
def test_a_copy_comes_back(make: Make, size_bytes: int, shift_bytes: int) -> None:
    device, memory = make(), lease(size_bytes=size_bytes, shift_bytes=shift_bytes)
    data = (bytes(range(251)) * (size_bytes // 251 + 1))[:size_bytes]
    copy = device.write(memoryview(bytearray(data)), shift_bytes, never)
    device.read(copy, memory.image, never)
    assert bytes(memory.image[shift_bytes : shift_bytes + size_bytes]) == data


def test_flipped_bytes_are_noticed(make: Make) -> None:
    device, memory = make(faults=EngineFaults(flips_after=0)), lease(size_bytes=PAGE_BYTES, shift_bytes=0)
    copy = device.write(payload(PAGE_BYTES), 0, never)
    with pytest.raises(CorruptSpillError, match="other bytes than were written"):
        device.read(copy, memory.image, never)


def test_a_read_error_says_what_to_do(make: Make) -> None:
    device, memory = make(faults=EngineFaults(read_fails_after=0)), lease(size_bytes=PAGE_BYTES, shift_bytes=0)
    copy = device.write(payload(PAGE_BYTES), 0, never)
    with pytest.raises(SpillReadError, match="compute the micro-batch again"):
        device.read(copy, memory.image, never)


@pytest.mark.parametrize(
    ("faults", "error"),
    [
        (EngineFaults(write_fails_after=0), SpillWriteError),
        (EngineFaults(vanishes_after=0), SpillWriteError),
        (EngineFaults(full_after=0), NoSpaceError),
    ],
)
def test_a_write_error_has_a_name_and_gives_the_slot_back(
    make: Make, faults: EngineFaults, error: type[SpillWriteError]
) -> None:
    device = make(faults=faults)
    with pytest.raises(error):
        device.write(payload(PAGE_BYTES), 0, never)
    assert device.stats().used_bytes == 0


def test_the_quota_is_obeyed(make: Make) -> None:
    device = make(quota_bytes=2 * PAGE_BYTES)
    copy = device.write(payload(PAGE_BYTES), 0, never)
    with pytest.raises(NoSpaceError, match="quota of 8192 bytes"):
        device.write(payload(2 * PAGE_BYTES), 0, never)
    device.free(copy.slot)
    device.write(payload(2 * PAGE_BYTES), 0, never)
    assert device.stats().slab_bytes <= 2 * PAGE_BYTES


def test_a_device_with_little_room_grows_by_what_is_needed(make: Make) -> None:
    device = make(MemoryEngine(capacity_bytes=4 * PAGE_BYTES))
    device.write(payload(3 * PAGE_BYTES), 0, never)
    assert device.stats().slab_bytes == 3 * PAGE_BYTES
    with pytest.raises(NoSpaceError, match="is full"):
        device.write(payload(2 * PAGE_BYTES), 0, never)
    assert device.stats().used_bytes == 3 * PAGE_BYTES


def test_a_cancelled_write_stops_between_pieces_and_gives_the_slot_back(make: Make) -> None:
    device, asked = make(), []

    def after_the_first() -> bool:
        asked.append(None)
        return len(asked) > 1

    with pytest.raises(EndedEarlyError):
        device.write(payload(3 * PIECE_BYTES), 0, after_the_first)
    assert device.stats().used_bytes == 0
    assert device.stats().written_bytes == PIECE_BYTES


class TensorEngine(MemoryEngine):
    """Takes tensors as an engine for CUDA memory does, from the CPU."""

    moved_by = "GPUDirect"

    def write_cuda(self, offset_bytes: int, memory: torch.Tensor) -> None:
        self.write(offset_bytes, [bytes_of(memory.untyped_storage())[memory.storage_offset() :][: memory.nbytes]])

    def read_cuda(self, offset_bytes: int, memory: torch.Tensor) -> None:
        self.read(offset_bytes, [bytes_of(memory.untyped_storage())[memory.storage_offset() :][: memory.nbytes]])


def test_device_memory_goes_there_and_back_without_the_host() -> None:
    engine = TensorEngine()
    assert isinstance(engine, CudaEngine)
    assert not isinstance(MemoryEngine(), CudaEngine)
    device = Device(engine, quota_bytes=1 << 40, threads=1)
    there = torch.randint(0, 256, (PIECE_BYTES + 77,), dtype=torch.uint8)
    copy = device.write_cuda(engine, [there], never)
    back = torch.zeros_like(there)
    device.read_cuda(engine, copy, [back], never)
    assert torch.equal(there, back)
    engine.write(copy.slot.offset_bytes, [memoryview(b"x")])
    with pytest.raises(CorruptSpillError):
        device.read_cuda(engine, copy, [back], never)
    device.close()


def test_what_was_copied_in_place_is_summed_where_it_is_and_compared_there() -> None:
    engine = HostEngine(1 << 20)
    device = Device(engine, quota_bytes=1 << 20, threads=2)
    there = torch.arange(4096, dtype=torch.int64).to(torch.uint8)

    def fill(image: memoryview) -> CopiedInPlace:
        return copied(torch.frombuffer(image, dtype=torch.uint8), there, there)

    copy = device.write_in_place(engine, there.nbytes, fill, never)
    assert device.has_cuda(copy, there)
    there[17] ^= 1
    assert not device.has_cuda(copy, there)
    with pytest.raises(CorruptSpillError):
        device.read_in_place(engine, copy, lambda _: CopiedInPlace(checksum=tensor_checksum(there), seconds=0.1), never)
    device.close()


@pytest.mark.parametrize("size_bytes", [1, 8, 4096, 4099, (1 << 20) + 12])
def test_the_checksum_of_a_tensor_sees_every_bit_and_every_place(size_bytes: int) -> None:
    memory = torch.randint(256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    first = tensor_checksum(memory)
    for place in {0, size_bytes // 2, size_bytes - 1}:
        for bit in (1, 128):
            memory[place] ^= bit
            assert tensor_checksum(memory) != first
            memory[place] ^= bit
    assert tensor_checksum(memory) == first
    if size_bytes >= 4096:
        words = size_bytes // 8
        row = 8 * (words // min(ROWS, math.isqrt(words)))
        for width in (8, row, 3 * row):  # words, and whole rows of the table
            swapped = torch.cat([memory[width : 2 * width], memory[:width], memory[2 * width :]])
            assert tensor_checksum(swapped) != first


class Terabyte(MemoryEngine):
    def capacity_bytes(self) -> int:
        return 10**12


def test_wear_is_what_was_written_of_the_whole_drive_at_this_pace_over_a_day(make: Make) -> None:
    device = make(Terabyte())
    for _ in range(5):
        device.free(device.write(payload(1 << 20), 0, never).slot)  # over the same place, as slabs are used
    stats = device.stats()
    assert stats.written_bytes == 5 << 20
    assert stats.slab_bytes < 10**12
    assert stats.drive_writes_per_day(3600.0) == (5 << 20) / 10**12 * 24
    assert stats.drive_writes_per_day(0.0) == 0.0
    assert replace(stats, capacity_bytes=0).drive_writes_per_day(3600.0) == 0.0  # memory does not wear


def test_wear_is_projected_from_the_first_pass_on(tmp_path: Path) -> None:
    now_s = [1000.0]
    config = OffloadConfig(dirs=(str(tmp_path),), min_bytes=1024)
    offload = ActivationOffload(config, engines=[Terabyte()], clock=lambda: now_s[0])
    x = torch.ones(1 << 18, requires_grad=True)
    with offload:
        result = (x * 2).exp()  # saves it: 1 MiB
        loss = result.sum()
    (device,) = offload._open().devices
    device.queue.close()  # it has been written
    device.queue = type(device.queue)("again", threads=1)
    loss.backward()  # type: ignore[no-untyped-call]
    now_s[0] += 7200.0
    stats = offload.stats()
    (drive,) = stats.devices
    assert stats.elapsed_s == 7200.0
    assert drive.written_bytes == drive_bytes(result)
    assert drive.drive_writes_per_day(stats.elapsed_s) == drive_writes_per_day(drive.written_bytes, 10**12, 7200.0)
    offload.close()


def drive_bytes(tensor: torch.Tensor) -> int:
    """The whole pages that its storage touches."""
    start = tensor.data_ptr() % PAGE_BYTES
    return (start + tensor.nbytes + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES


def test_the_rate_is_bytes_over_the_time_that_something_moved() -> None:
    now = 0.0
    meter = Meter(DeviceTime(lambda: now))
    meter.start()
    now = 1.0
    meter.start()  # two at once count once
    now = 2.0
    meter.stop(32 << 20)
    meter.stop(32 << 20)
    now = 50.0  # idle
    meter.mark()
    assert meter.recent_bytes_per_s == 32 << 20


def test_the_rate_of_what_is_copied_in_place_is_that_of_the_copies_alone() -> None:
    now_s = [100.0]
    device = Device(HostEngine(64 << 20), quota_bytes=64 << 20, clock=lambda: now_s[0])
    engine = device.engine
    assert isinstance(engine, HostEngine)

    def slowly(_image: memoryview) -> CopiedInPlace:
        now_s[0] += 10.0  # its turn, a sum, the interpreter's lock
        return CopiedInPlace(checksum=1, seconds=0.25)

    copies = [device.write_in_place(engine, 16 << 20, slowly, never) for _ in range(2)]
    device.read_in_place(engine, copies[0], slowly, never)
    for meter in (device.writes, device.reads):
        meter.mark()
        assert meter.recent_bytes_per_s == (16 << 20) / 0.25
    device.close()


def test_the_fastest_copy_tells_the_rate_unless_it_is_too_small_to_tell() -> None:
    meter = Meter(DeviceTime(lambda: 0.0))

    def copies(size_bytes: int, took_s: float) -> None:
        meter.start()
        meter.tell(meter.lone, size_bytes, took_s)
        meter.stop(size_bytes)

    for size_bytes, took_s in ((32 << 20, 2.0), (32 << 20, 0.5), (64 << 20, 3.0), (1 << 20, 0.001)):
        copies(size_bytes, took_s)
    meter.mark()
    assert meter.recent_bytes_per_s == (32 << 20) / 0.5
    copies(32 << 20, 1.0)  # the next step, on a bus that others use, too
    meter.mark()
    assert meter.recent_bytes_per_s == 32 << 20
    meter.mark()  # nothing was moved: it stays
    assert meter.recent_bytes_per_s == 32 << 20
    assert meter.moved_bytes == (161 << 20)


def test_copies_that_wait_for_each_other_do_not_tell_the_rate() -> None:
    meter = Meter(DeviceTime(lambda: 0.0))
    meter.start()
    first = meter.lone
    meter.start()  # before the first one has ended
    meter.tell(first, 32 << 20, 1.0)
    meter.stop(32 << 20)
    meter.start()
    assert meter.lone == 0  # the second one is under way
    meter.tell(meter.lone, 32 << 20, 1.0)
    for _ in range(2):
        meter.stop(32 << 20)
    meter.mark()
    assert meter.recent_bytes_per_s == ASSUMED_BYTES_PER_S


@pytest.mark.parametrize(("engine", "is_shared"), [(MemoryEngine(), True), (HostEngine(1 << 20), False)])
def test_directions_that_move_at_once_share_the_time_of_a_drive(engine: IoEngine, is_shared: bool) -> None:
    now_s = [100.0]
    device = Device(engine, clock=lambda: now_s[0])
    device.writes.start()
    now_s[0] += 2.0
    device.reads.start()
    now_s[0] += 2.0  # both
    device.writes.stop(48 << 20)
    now_s[0] += 1.0
    device.reads.stop(32 << 20)
    now_s[0] += 50.0  # idle
    for meter in (device.writes, device.reads):
        meter.mark()
    device.close()
    writes_s, reads_s = (3.0, 2.0) if is_shared else (4.0, 3.0)
    assert device.writes.recent_bytes_per_s == (48 << 20) / writes_s
    assert device.reads.recent_bytes_per_s == (32 << 20) / reads_s
