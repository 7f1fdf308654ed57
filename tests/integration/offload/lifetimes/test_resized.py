"""Pieces whose storages are resized, as on a device, here in the CPU's memory: addresses change, and no bit does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastrain.offload.drives.device import Copy, Device, EndedEarlyError
from elastrain.offload.drives.host import HostEngine
from elastrain.offload.drives.host_buffers import pages
from elastrain.offload.drives.posix import PosixEngine
from elastrain.offload.drives.transfer import StagingPool
from elastrain.offload.errors import CorruptSpillError
from elastrain.offload.lifetimes import conductor, moving
from elastrain.offload.lifetimes import within as room
from elastrain.offload.lifetimes.conductor import Conductor
from elastrain.offload.lifetimes.pieces.piece_memory import MemoryMeter, MemoryPool, Span
from elastrain.offload.lifetimes.pieces.resized import ResizedPool
from elastrain.offload.planning.orders import StepStage
from tests.integration.offload.lifetimes import test_within as training
from tests.integration.offload.lifetimes.touching import NothingBesides

MIB = 1 << 20


class CountedMark(int):
    """It is reached at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CountedLanes:
    """Marks are numbers; what is copied remembers the mark that it came after."""

    def __init__(self) -> None:
        self.marks = 0
        self.copied_after: list[int] = []

    def mark(self) -> CountedMark:
        self.marks += 1
        return CountedMark(self.marks)

    @contextmanager
    def copying(self, mark: int) -> Iterator[None]:
        self.copied_after.append(mark)
        yield


def resized(lanes: CountedLanes) -> ResizedPool:
    staging = StagingPool(8 * MIB, lambda size_bytes: torch.frombuffer(pages(size_bytes), dtype=torch.uint8))
    return ResizedPool(torch.device("cpu"), lanes, staging)


def watched(write: Callable[..., Copy], sizes: list[int]) -> Callable[..., Copy]:
    def note(device: Device, payload: memoryview, *others: Any, **more: Any) -> Copy:
        sizes.append(payload.nbytes)
        return write(device, payload, *others, **more)

    return note


def test_bits_are_those_of_plain_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lanes = CountedLanes()

    def memory(_model: nn.Module, _limit_bytes: int) -> tuple[MemoryPool, MemoryMeter]:
        return resized(lanes), NothingBesides()

    monkeypatch.setattr(room, "memory_for", memory)
    expected = training.plain(training.build("gpt", training.SHAPE)[0])
    found = training.limited(training.build("gpt", training.SHAPE)[0], tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert lanes.copied_after


class PacedMeter(NothingBesides):
    """As of a device that does later what is asked for; who waits for it is noted."""

    runs_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self.paced: list[StepStage] = []
        self.now: list[StepStage] = []

    def keep_pace(self) -> None:
        self.paced.append(self.now[-1])


def test_the_host_is_a_forward_or_backward_ahead_and_no_update(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meter, arrive = PacedMeter(), Conductor.arrive

    def noting(self: Conductor, stage: StepStage, *others: Any) -> None:
        meter.now.append(stage)
        arrive(self, stage, *others)

    monkeypatch.setattr(Conductor, "arrive", noting)
    monkeypatch.setattr(conductor, "WATCHED_STEPS", 0)  # who looks closely does not run ahead
    monkeypatch.setattr(room, "memory_for", lambda _model, _limit_bytes: (resized(CountedLanes()), meter))
    training.limited(training.build("gpt", training.SHAPE)[0], tmp_path)
    assert {*meter.paced} == {StepStage.FORWARD, StepStage.BACKWARD}
    assert StepStage.UPDATE in meter.now


def test_a_piece_that_is_out_has_no_bytes_and_all_views_see_them_come_back(tmp_path: Path) -> None:
    lanes = CountedLanes()
    pool, device = resized(lanes), Device(PosixEngine(tmp_path))
    piece = pool.make(3 * MIB)
    piece.tensor.copy_(torch.randint(0, 256, (3 * MIB,), dtype=torch.uint8))
    view, before, span = piece.tensor[MIB:].view(torch.int32), piece.tensor.clone(), Span(begin_bytes=0, size_bytes=MIB)
    rest = Span(begin_bytes=MIB, size_bytes=2 * MIB)
    pool.mark(piece)
    written = pool._lanes.marks  # type: ignore[attr-defined]
    copies = [piece.write(device, each, lambda: False) for each in (span, rest)]
    pool.take_from(piece)
    assert piece.tensor.untyped_storage().nbytes() == 0
    pool.give_to(piece)
    for each, copy in zip((span, rest), copies, strict=True):
        piece.read(device, each, copy, lambda: False)
    device.close()
    assert torch.equal(piece.tensor, before)
    assert torch.equal(view, before[MIB:].view(torch.int32))
    # Reads come after whoever had the memory before: the mark is one of when it was taken.
    assert lanes.copied_after == [written, written, written + 1, written + 1]


def test_a_tier_of_host_memory_is_copied_to_straight_and_a_flipped_bit_there_is_found() -> None:
    lanes = CountedLanes()
    pool, host = resized(lanes), HostEngine(8 * MIB)
    device, piece = Device(host, quota_bytes=8 * MIB), pool.make(3 * MIB)
    before = torch.randint(0, 256, (3 * MIB,), dtype=torch.uint8)
    piece.tensor.copy_(before)
    pool.mark(piece)
    span = Span(begin_bytes=MIB, size_bytes=2 * MIB)
    copy = piece.write(device, span, lambda: False)
    assert bytes(host.view(copy.slot.offset_bytes, 2 * MIB)) == before[MIB:].numpy().tobytes()
    piece.tensor.zero_()
    piece.read(device, span, copy, lambda: False)
    assert torch.equal(piece.tensor[MIB:], before[MIB:])
    assert pool._staging.held_bytes == 0
    host.view(copy.slot.offset_bytes + MIB, 1)[0] ^= 1
    with pytest.raises(CorruptSpillError, match="other bytes than were written"):
        piece.read(device, span, copy, lambda: False)
    with pytest.raises(EndedEarlyError):
        piece.write(device, span, lambda: True)
    device.free(copy.slot)
    assert device.used_bytes == 0
    device.close()


@pytest.mark.usefixtures("small_limits")
def test_parts_of_a_large_piece_move_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(moving, "PART_BYTES", 40 << 10)
    parts: list[int] = []
    monkeypatch.setattr(Device, "write", watched(Device.write, parts))
    expected = training.plain(training.build("gpt", training.SHAPE)[0])
    found = training.limited(training.build("gpt", training.SHAPE)[0], tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert parts.count(40 << 10) > 100  # no whole piece has that size
