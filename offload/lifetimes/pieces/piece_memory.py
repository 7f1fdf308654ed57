"""The port to the memory of pieces: what custody asks of it, the same for the CPU and for CUDA. No I/O is decided here.

A piece's tensor stays one object for ever: parameters, gradients and states are views of it, and are good whenever the
piece is in. Under it bytes come and go.

One piece, as custody holds it: its memory, and where its bytes are.

The one limit, and all that counts against it. Values only; custody's lock guards it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from elastrain.offload.drives.device import Copy, Device
from elastrain.offload.drives.request_queue import IoRequest, Mark
from elastrain.offload.drives.residency import State
from elastrain.offload.errors import OffloadError
from elastrain.offload.planning.plan_values import Kind


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


class PiecePart:
    """What one drive has of a piece's copy."""

    def __init__(self, device: Device, span: Span) -> None:
        self.device = device
        self.span = span
        self.copy: Copy | None = None
        self.request: IoRequest | None = None


class HeldPiece:
    """One piece: its addresses, where its bytes are, and who moves them. Custody's lock guards all but the first line.

    `state` DROPPED: it holds nothing that anybody needs, and has no memory. `written`: by somebody from outside.
    """

    def __init__(self, name: str, kind: Kind, memory: PieceMemory) -> None:
        self.name, self.kind, self.memory = name, kind, memory
        self.state = State.RESIDENT
        self.leaving = self.written = False
        self.shares: tuple[tuple[int, int], ...] = ()  # drives by their numbers, and bytes; none: wherever it is free
        self.parts: list[PiecePart] = []
        self.moving_parts = 0
        self.fault: OffloadError | None = None

    @property
    def size_bytes(self) -> int:
        """What it takes in memory: whole pages."""
        return self.memory.size_bytes

    def show(self) -> None:
        """Let it be read."""
        if self.memory.access is Access.NONE:
            self.memory.allow(Access.READ)

    def open(self) -> None:
        """Let it be written, too: no copy is good any more."""
        self.memory.allow(Access.WRITE)

    def close(self) -> None:
        """Whoever writes from now on is told of."""
        if self.memory.access is Access.WRITE:
            self.memory.allow(Access.READ)


class OtherMemory(Protocol):
    """What counts besides pieces and comes and goes by itself: saved tensors."""

    def live_bytes(self) -> int:
        """In memory now."""

    def idle_bytes(self) -> int:
        """Besides, what is kept for the next of them, and is no reason to refuse anything."""

    def moving_bytes(self) -> int:
        """Of these, what is on its way out."""

    def give_up(self) -> bool:
        """Let everything leave that can. Returns True if a drive is moving something then."""


class RoomAccount:
    """The one limit, and all that counts against it.

    Pieces; `others`; `reserved_bytes` for what computes now; `coming_bytes` of what it makes and was not made yet;
    `outside_bytes` that are held and that nobody here knows.
    """

    def __init__(self, limit_bytes: int, others: OtherMemory) -> None:
        self.limit_bytes = limit_bytes
        self.others = others
        self.piece_bytes = self.most_bytes = 0
        self.reserved_bytes = self.coming_bytes = self.outside_bytes = 0

    def add(self, more_bytes: int) -> None:
        """Count pieces' memory."""
        self.piece_bytes += more_bytes
        self.most_bytes = max(self.most_bytes, self.held())  # memory: estimates are none

    def came(self, size_bytes: int) -> None:
        """So much of what was to come is there."""
        self.coming_bytes = max(0, self.coming_bytes - size_bytes)

    def total(self) -> int:
        """All that counts."""
        return self.held() + self.others.idle_bytes() + self.reserved_bytes + self.coming_bytes + self.outside_bytes

    def held(self) -> int:
        """What is in memory for sure: no estimate."""
        return self.piece_bytes + self.others.live_bytes()

    def missing_bytes(self, size_bytes: int) -> int:
        """How much has to go before so much more fits."""
        return max(0, self.total() + size_bytes - self.limit_bytes)
