"""Storages and pieces of a device's memory go to drives and come back, in threads of the drives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from elastrain.device import DevicePort
from elastrain.offload.drives import transfer
from elastrain.offload.drives.device import Device
from elastrain.offload.drives.posix import PosixEngine
from elastrain.offload.lifetimes.pieces.cuda import cuda_memory, pinned_engine
from elastrain.offload.lifetimes.pieces.piece_memory import Span

Result = TypeVar("Result")
MIB = 1 << 20


def never() -> bool:
    return False


@pytest.fixture(params=["drive", "host memory"])
def drive(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Device]:
    made = Device(PosixEngine(tmp_path) if request.param == "drive" else pinned_engine(16 * MIB), quota_bytes=16 * MIB)
    yield made
    made.close()


def in_thread(act: Callable[[], Result]) -> Result:
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join(30)
    (result,) = found
    return result


def content(port: DevicePort) -> torch.Tensor:
    return (torch.arange(3 * MIB, device=port.device) % 251).to(torch.uint8)


def test_a_storage_comes_back_from_a_drive(port: DevicePort, drive: Device) -> None:
    tensor = content(port)
    storage = tensor.untyped_storage()
    ready = transfer.ready_event(storage)
    copy = in_thread(lambda: transfer.write(drive, storage, ready, never, kind="test"))
    assert in_thread(lambda: transfer.is_same(drive, copy, storage, ready))
    if port.is_host:
        return  # its memory for reads is the arena's
    place = transfer.take(size_bytes=copy.size_bytes, device=port.device)
    in_thread(lambda: transfer.read(drive, copy, place, never))
    transfer.hand_over(place)
    assert torch.equal(torch.empty(0, dtype=torch.uint8, device=port.device).set_(place), tensor)
    tensor += 1
    later = transfer.ready_event(storage)
    assert not in_thread(lambda: transfer.is_same(drive, copy, storage, later))


def test_a_part_of_a_piece_comes_back_from_a_drive(port: DevicePort, drive: Device) -> None:
    if port.is_host:
        return  # its pieces lie in a `PagePool`
    pool, meter = cuda_memory(port.device)
    piece, span, tensor = pool.make(3 * MIB), Span(begin_bytes=MIB, size_bytes=MIB), content(port)
    piece.tensor.copy_(tensor)
    pool.mark(piece)
    copy = in_thread(lambda: piece.write(drive, span, never))
    meter.keep_pace()
    assert meter.own_bytes()[0] >= 3 * MIB
    piece.tensor.zero_()
    pool.mark(piece)
    in_thread(lambda: piece.read(drive, span, copy, never))
    assert torch.equal(piece.part(MIB, MIB), tensor[MIB : 2 * MIB])
    assert not piece.part(0, MIB).any() and not piece.part(2 * MIB, MIB).any()
