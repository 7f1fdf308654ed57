"""Pieces on a device, whose storages are resized: bytes come and go, and no bit changes, and there is no race."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from elastrain.device import device_of
from elastrain.offload.activations.deferred import DeferredLock
from elastrain.offload.drives.device import Copy, Device, EndedEarlyError
from elastrain.offload.drives.host import HostEngine
from elastrain.offload.drives.posix import PosixEngine
from elastrain.offload.errors import CorruptSpillError, OffloadConfigError
from elastrain.offload.lifetimes import conductor, moving, within_inputs
from elastrain.offload.lifetimes import within as room
from elastrain.offload.lifetimes.conductor import Conductor
from elastrain.offload.lifetimes.pieces.cuda import cuda_memory
from elastrain.offload.lifetimes.pieces.piece_memory import Span
from elastrain.offload.lifetimes.pieces.resized import ResizedPool
from elastrain.offload.planning.orders import StepStage
from tests.integration.offload.lifetimes import test_within as training
from tests.integration.offload.lifetimes.touching import NothingBesides, tokens
from tests.support import late

MIB = 1 << 20
LATE = "late:0"


def resized() -> ResizedPool:
    return cuda_memory(torch.device(LATE))[0]


def watched(write: Callable[..., Copy], sizes: list[int]) -> Callable[..., Copy]:
    def note(device: Device, payload: memoryview, *others: Any, **more: Any) -> Copy:
        sizes.append(payload.nbytes)
        return write(device, payload, *others, **more)

    return note


def model() -> nn.Module:
    torch.__future__.set_swap_module_params_on_conversion(True)  # ties stay
    return training.build("gpt", training.SHAPE)[0].to(LATE)


def loss(model: nn.Module, step: int) -> Tensor:
    found: Tensor = model(tokens(step).to(LATE, non_blocking=True))
    return found


@contextmanager
def allowed(meter: NothingBesides) -> Iterator[None]:
    """Let a model on the test device train within a limit, which otherwise CUDA's models may only."""
    # Whoever holds the lock of a condition knows what those knew who have released it.
    late.handing_over(threading.Condition, gives=["__exit__"], takes=["__enter__", "wait"])
    late.handing_over(DeferredLock, gives=["__exit__", "wait"], takes=["__enter__", "wait"])
    with (
        patch.object(within_inputs, "DEVICES", ("cpu", "late")),
        patch.object(room, "memory_for", lambda _model, _limit_bytes: (resized(), meter)),
    ):
        yield


def limited() -> list[Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        return training.limited(model(), Path(folder), loss)


def is_same(found: list[Tensor]) -> bool:
    """Return True if the bits are those of plain training on the CPU."""
    expected = training.plain(training.build("gpt", training.SHAPE)[0])
    return all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


def test_bits_are_those_of_plain_training() -> None:
    with allowed(NothingBesides()):
        found = limited()
    assert is_same(found)
    assert late.races() == []


class PacedMeter(NothingBesides):
    """A meter of a device that computes later; it notes the stages in which the host waits for the device."""

    runs_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self.paced: list[StepStage] = []
        self.now: list[StepStage] = []

    def keep_pace(self) -> None:
        self.paced.append(self.now[-1])


def test_the_host_is_a_forward_or_backward_ahead_and_no_update() -> None:
    meter, arrive = PacedMeter(), Conductor.arrive

    def noting(self: Conductor, stage: StepStage, *others: Any) -> None:
        meter.now.append(stage)
        arrive(self, stage, *others)

    # A conductor that looks closely does not run ahead.
    with patch.object(Conductor, "arrive", noting), patch.object(conductor, "WATCHED_STEPS", 0), allowed(meter):
        limited()
    assert {*meter.paced} == {StepStage.FORWARD, StepStage.BACKWARD}
    assert StepStage.UPDATE in meter.now


def test_a_piece_that_is_out_has_no_bytes_and_all_views_see_them_come_back() -> None:
    pool, memory = resized(), torch.get_device_module("late")
    before = torch.randint(0, 256, (3 * MIB,), dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as folder:
        device, piece = Device(PosixEngine(folder)), pool.make(3 * MIB)
        piece.tensor.copy_(before)
        view = piece.tensor[MIB:].view(torch.int32)
        spans = Span(begin_bytes=0, size_bytes=MIB), Span(begin_bytes=MIB, size_bytes=2 * MIB)
        pool.mark(piece)
        copies = [piece.write(device, each, lambda: False) for each in spans]
        held = memory.memory_allocated()
        pool.take_from(piece)
        assert piece.tensor.untyped_storage().nbytes() == 0 and memory.memory_allocated() == held - 3 * MIB
        with pytest.raises(RuntimeError, match="illegal access to memory of late that resize_ has freed"):
            view.add_(1)
        pool.give_to(piece)
        for each, copy in zip(spans, copies, strict=True):
            piece.read(device, each, copy, lambda: False)
        device.close()
    assert torch.equal(piece.tensor.cpu(), before)
    assert torch.equal(view.cpu(), before[MIB:].view(torch.int32))
    assert late.races() == []


def test_copies_come_after_what_the_compute_stream_has_done_to_their_bytes() -> None:
    pool, span = resized(), Span(begin_bytes=0, size_bytes=MIB)
    device, piece = Device(HostEngine(8 * MIB), quota_bytes=8 * MIB), pool.make(MIB)
    marked = piece.mark
    piece.tensor.fill_(1)
    piece.mark = marked  # of before the kernel
    with pytest.raises(late.RaceError, match="copy out"):
        piece.write(device, span, lambda: False)
    pool.mark(piece)
    copy = piece.write(device, span, lambda: False)
    pool.take_from(piece)
    pool.give_to(piece)
    piece.mark = marked  # of before the bytes were another tensor's
    with pytest.raises(late.RaceError, match="copy in"):
        piece.read(device, span, copy, lambda: False)
    late.races(forget=True)
    device.close()


def test_a_second_stream_that_computes_with_pieces_is_refused() -> None:
    pool = resized()
    piece = pool.make(MIB)
    with (
        device_of(torch.device(LATE)).side_stream(),
        pytest.raises(OffloadConfigError, match="uses a second CUDA stream"),
    ):
        pool.mark(piece)


def test_a_tier_of_host_memory_is_copied_to_straight_and_a_flipped_bit_there_is_found() -> None:
    pool, host = resized(), HostEngine(8 * MIB)
    device, piece = Device(host, quota_bytes=8 * MIB), pool.make(3 * MIB)
    before = torch.randint(0, 256, (3 * MIB,), dtype=torch.uint8)
    piece.tensor.copy_(before)
    pool.mark(piece)
    span = Span(begin_bytes=MIB, size_bytes=2 * MIB)
    copy = piece.write(device, span, lambda: False)
    assert bytes(host.view(copy.slot.offset_bytes, 2 * MIB)) == before[MIB:].numpy().tobytes()
    piece.tensor.zero_()
    pool.mark(piece)
    piece.read(device, span, copy, lambda: False)
    assert torch.equal(piece.tensor[MIB:].cpu(), before[MIB:])
    assert pool._staging.held_bytes == 0
    host.view(copy.slot.offset_bytes + MIB, 1)[0] ^= 1
    with pytest.raises(CorruptSpillError, match="other bytes than were written"):
        piece.read(device, span, copy, lambda: False)
    with pytest.raises(EndedEarlyError):
        piece.write(device, span, lambda: True)
    device.free(copy.slot)
    assert device.used_bytes == 0
    device.close()


def test_parts_of_a_large_piece_move_side_by_side() -> None:
    parts: list[int] = []
    with (
        patch.object(moving, "PART_BYTES", 40 << 10),
        patch.object(Device, "write", watched(Device.write, parts)),
        allowed(NothingBesides()),
    ):
        found = limited()
    assert is_same(found)
    assert parts.count(40 << 10) > 100  # no whole piece has that size
