"""Interfaces to the memory of pieces, the same for the CPU and for CUDA; the state of one piece; and the account.

A piece's tensor stays the same object. Parameters, gradients and states are views of it, valid while the piece is in
memory. `HeldPiece` is one piece as the piece store sees it. `RoomAccount` is the limit and all that counts against it,
guarded by the store's lock. No I/O is decided here.
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
    """A part of a piece that one drive gets. It has whole pages; only the last part may end inside a page."""

    begin_bytes: int
    size_bytes: int


class Access(Enum):
    """The access to a piece's memory that is permitted. Anything beyond it is a fault that `page_faults.py` handles."""

    NONE = "none"
    READ = "read"
    WRITE = "read and write"


class PieceMemory(Protocol):
    """The memory of one piece. `tensor` has all its bytes; `size_bytes` is a multiple of the page size.

    Drives neither read it nor fill it before its `mark` is reached.
    """

    tensor: torch.Tensor
    size_bytes: int
    access: Access
    mark: Mark | None

    def part(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """Return these bytes as a tensor.

        On the CPU its storage ends with them, so that saving a parameter stays small.
        """

    def allow(self, access: Access) -> None:
        """Permit this access and no more; no effect on a device. The store's lock is held."""

    def write(self, device: Device, span: Span, cancelled: Callable[[], bool]) -> Copy:
        """Copy a part to a drive, with its content at `MemoryPool.mark`. Called in a drive's thread.

        Raises the errors of `Device.write`.
        """

    def read(self, device: Device, span: Span, copy: Copy, cancelled: Callable[[], bool]) -> None:
        """Read a part from a drive. Afterwards every stream may use it. Called in a drive's thread.

        Raises the errors of `Device.read`.
        """


class MemoryPool(Protocol):
    """A pool that gives memory to arriving pieces and takes it from leaving ones.

    The store's lock is held in each call.
    """

    @property
    def parked_bytes(self) -> int:
        """Bytes that belong to no piece, and count as used until `trim`."""

    def make(self, size_bytes: int) -> PieceMemory:
        """Return memory for a new piece, which is in memory. Called by the training thread."""

    def mark(self, memory: PieceMemory) -> None:
        """Order the work queued on the piece so far before the write that follows. Called by the training thread."""

    def take_from(self, memory: PieceMemory) -> None:
        """Take the memory of a piece that is out; later accesses are faults. Called by any thread."""

    def give_to(self, memory: PieceMemory) -> None:
        """Give memory with undefined, hidden content to a piece. Called by the training thread."""

    def trim(self, keep_bytes: int) -> None:
        """Give parked memory back until at most `keep_bytes` are left."""


class MemoryMeter(Protocol):
    """A meter of the memory that is in use, from the kernel or from CUDA's allocator.

    `runs_ahead` is True if work is queued and done later, so that `clock` waits for it.
    """

    runs_ahead: bool

    def own_bytes(self) -> tuple[int, int]:
        """Return the bytes in use now, and the most since `forget_peak`."""

    def forget_peak(self) -> None:
        """Restart the peak from the present memory."""

    def clock(self) -> float:
        """Wait for all queued work, and return the time in seconds."""

    def keep_pace(self) -> None:
        """Wait for all work that was queued before the last call of this method, if work is queued at all."""


class PiecePart:
    """The part of a piece's copy that lies on one drive."""

    def __init__(self, device: Device, span: Span) -> None:
        self.device = device
        self.span = span
        self.copy: Copy | None = None
        self.request: IoRequest | None = None


class HeldPiece:
    """One piece: its memory, its residency state, and its parts on drives.

    The store's lock guards all fields but `name`, `kind` and `memory`. In state DROPPED, the piece has no content and
    no memory. `written` is True if code outside of training wrote to it.
    """

    def __init__(self, name: str, kind: Kind, memory: PieceMemory) -> None:
        self.name, self.kind, self.memory = name, kind, memory
        self.state = State.RESIDENT
        self.leaving = self.written = False
        self.shares: tuple[tuple[int, int], ...] = ()  # (drive, bytes) of each; empty: any drive with room
        self.parts: list[PiecePart] = []
        self.moving_parts = 0
        self.fault: OffloadError | None = None

    @property
    def size_bytes(self) -> int:
        """The size in memory, in whole pages."""
        return self.memory.size_bytes

    def show(self) -> None:
        """Make the piece readable."""
        if self.memory.access is Access.NONE:
            self.memory.allow(Access.READ)

    def open(self) -> None:
        """Make the piece writable; its copies are not valid any longer."""
        self.memory.allow(Access.WRITE)

    def close(self) -> None:
        """Make a writable piece read-only, so that later writes are noticed."""
        if self.memory.access is Access.WRITE:
            self.memory.allow(Access.READ)


class OtherMemory(Protocol):
    """Memory besides pieces that comes and goes by itself: saved tensors."""

    def live_bytes(self) -> int:
        """Return the bytes in memory now."""

    def idle_bytes(self) -> int:
        """Return the bytes of free buffers, which come on top and never cause a refusal."""

    def moving_bytes(self) -> int:
        """Return the live bytes that are being written."""

    def give_up(self) -> bool:
        """Start to move everything out of memory that can leave. Returns True if a drive is moving something then."""


class RoomAccount:
    """The memory limit, and all that counts against it.

    That is pieces; `others`; `reserved_bytes` for the present computation; `coming_bytes` that it will still create;
    and `outside_bytes` that are held by parts unknown here.
    """

    def __init__(self, limit_bytes: int, others: OtherMemory) -> None:
        self.limit_bytes = limit_bytes
        self.others = others
        self.piece_bytes = self.most_bytes = 0
        self.reserved_bytes = self.coming_bytes = self.outside_bytes = 0

    def add(self, more_bytes: int) -> None:
        """Add to the bytes of pieces in memory."""
        self.piece_bytes += more_bytes
        self.most_bytes = max(self.most_bytes, self.held())  # real memory without estimates

    def came(self, size_bytes: int) -> None:
        """Note that expected bytes now exist."""
        self.coming_bytes = max(0, self.coming_bytes - size_bytes)

    def total(self) -> int:
        """Return all bytes that count against the limit."""
        return self.held() + self.others.idle_bytes() + self.reserved_bytes + self.coming_bytes + self.outside_bytes

    def held(self) -> int:
        """Return the bytes that are in memory, without estimates."""
        return self.piece_bytes + self.others.live_bytes()

    def missing_bytes(self, size_bytes: int) -> int:
        """Return the bytes that must leave before `size_bytes` more fit."""
        return max(0, self.total() + size_bytes - self.limit_bytes)
