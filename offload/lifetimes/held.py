"""One piece, as custody holds it: its memory, and where its bytes are."""

from __future__ import annotations

from elastrain.offload.device import Copy, Device
from elastrain.offload.errors import OffloadError
from elastrain.offload.lifetimes.memory import Access, PieceMemory, Span
from elastrain.offload.lifetimes.values import Kind
from elastrain.offload.queue import IoRequest
from elastrain.offload.residency import State


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
