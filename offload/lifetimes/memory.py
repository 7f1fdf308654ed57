"""The port to the memory of pieces: what custody asks of it, the same for the CPU and for CUDA. No I/O is decided here.

A piece's tensor stays one object for ever: parameters, gradients and states are views of it, and are good whenever the
piece is in. Under it bytes come and go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from elastrain.offload.device import Copy, Device
from elastrain.offload.queue import Mark


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a piece: what one drive gets of it. Whole pages, but for the last one's end."""

    begin_bytes: int
    size_bytes: int


class Access(Enum):
    """What anybody may do with a piece's memory; who does more is told to `touches.py`."""

    NONE = "none"
    READ = "read"
    WRITE = "read and write"


class PieceMemory(Protocol):
    """One piece's memory. `tensor` is all of its bytes, `size_bytes` of them, a multiple of the page.

    Before its `mark` is reached, drives neither read it nor fill it.
    """

    tensor: torch.Tensor
    size_bytes: int
    access: Access
    mark: Mark | None

    def part(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """Return these bytes as a tensor; on the CPU its storage ends with them, so that a saved parameter is small."""

    def allow(self, access: Access) -> None:
        """From now on so much, and no more; on a device nothing changes. Custody's lock is held."""

    def write(self, device: Device, span: Span, cancelled: Callable[[], bool]) -> Copy:
        """Copy a part to a drive as it was at `MemoryPool.mark`. In a drive's thread.

        Raises what `Device.write` raises.
        """

    def read(self, device: Device, span: Span, copy: Copy, cancelled: Callable[[], bool]) -> None:
        """Fill a part; when this returns, every stream may use it. In a drive's thread. Raises as `Device.read`."""


class MemoryPool(Protocol):
    """Gives memory to pieces that arrive and takes it from those that are out. Custody's lock is held in each call."""

    @property
    def parked_bytes(self) -> int:
        """What is held for nobody, and counts as used until `trim`."""

    def make(self, size_bytes: int) -> PieceMemory:
        """Memory for a new piece, which is in. By the training thread."""

    def mark(self, memory: PieceMemory) -> None:
        """What was asked of the piece until now comes before the write that follows. By the training thread."""

    def take_from(self, memory: PieceMemory) -> None:
        """The piece is out: its bytes may go to others; who touches it is told. By any thread."""

    def give_to(self, memory: PieceMemory) -> None:
        """The piece has memory again, with undefined bytes that nobody may see. By the training thread."""

    def trim(self, keep_bytes: int) -> None:
        """Give parked memory back, down to so many bytes."""


class MemoryMeter(Protocol):
    """What really is held, told by who hands memory out: the kernel, or CUDA's allocator.

    `runs_ahead` says that what was asked for is done later, so that `clock` waits for it.
    """

    runs_ahead: bool

    def own_bytes(self) -> tuple[int, int]:
        """Memory in use now, and at most since `forget_peak`."""

    def forget_peak(self) -> None:
        """Let the peak begin anew from what is held now."""

    def clock(self) -> float:
        """The seconds at which all is done that was asked for until now."""

    def keep_pace(self) -> None:
        """Wait until all is done that was asked for before this was called last, where it runs ahead."""
