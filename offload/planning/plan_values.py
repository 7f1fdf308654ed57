"""Frozen values of a plan: points, pieces, uses, gaps, tiers and moves. No torch, no I/O.

A step is a ring of points: the first point of the next step follows the last one. A place is the index of a point on
this ring. Indices from the number of points on lie in the next step, and negative ones in the previous step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise


class Kind(Enum):
    """The content of a piece."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    STATE = "optimizer state"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"


@dataclass(frozen=True, kw_only=True)
class Use:
    """One use of a piece at a point. The point may change it; with `begins`, it does not need the former content."""

    point: int
    changes: bool = False
    begins: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryPiece:
    """A unit that moves as a whole, such as one block's parameters.

    `uses` are sorted by point, at most one per point.
    """

    name: str
    kind: Kind
    size_bytes: int
    uses: tuple[Use, ...]

    def __post_init__(self) -> None:
        places = [use.point for use in self.uses]
        if not places or any(after <= before for before, after in pairwise(places)):
            raise ValueError(f"the uses of {self.name} must be sorted by their points, with at least one: {places}")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A unit of a step's work, such as a block's forward. `extra_bytes` is memory that it takes besides all pieces."""

    name: str
    seconds: float
    extra_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """Pieces that can be dropped after point `after` and computed again at point `again`, at the cost of `seconds`.

    Each piece has a gap between exactly these two points, and both lie in one step.
    """

    name: str
    pieces: tuple[int, ...]
    after: int
    again: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Program:
    """One step: its points in order, the pieces that they use, and the recomputations that are possible."""

    points: tuple[Point, ...]
    pieces: tuple[MemoryPiece, ...]
    recomputations: tuple[Recomputation, ...] = ()

    def __post_init__(self) -> None:
        if any(use.point >= len(self.points) or use.point < 0 for piece in self.pieces for use in piece.uses):
            raise ValueError("a piece is used at a point that the program does not have")


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A stretch in which a piece may be out of memory: after its use at `begin` until its next use at `end`.

    `end` may lie in the next step. `changed` is the point of the last change at or before `begin`. It is None if
    nothing ever changes the piece: then one copy stays valid for the whole training.
    """

    piece: int
    begin: int
    end: int
    changed: int | None


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A destination of pieces: a drive, or a share of host memory (`is_memory`). Rates are in bytes per second.

    With `duplex`, reads and writes do not slow each other down. `capacity_bytes` is None if the tier has no bound.
    """

    name: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float = 0.0
    duplex: bool = False
    capacity_bytes: int | None = None
    is_memory: bool = False

    def __post_init__(self) -> None:
        if min(self.read_bytes_per_s, self.write_bytes_per_s) <= 0 or self.latency_s < 0:
            raise ValueError(f"{self.name}: rates must be above zero, and the latency not below")

    def write_s(self, size_bytes: float) -> float:
        """Return the seconds that it takes to write `size_bytes`."""
        return self.latency_s + size_bytes / self.write_bytes_per_s

    def read_s(self, size_bytes: float) -> float:
        """Return the seconds that it takes to read `size_bytes`."""
        return self.latency_s + size_bytes / self.read_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The resources of a plan: the memory limit, and the tiers for pieces that are out of memory."""

    limit_bytes: int
    tiers: tuple[Tier, ...]


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a piece that lies on one tier."""

    tier: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Move:
    """One gap in which a piece leaves memory: after point `gap.begin`, or later, once its copy is written.

    The copy is written after point `write_after`, which is None if a valid copy exists. The read starts with point
    `read_at`, at most `gap.end`.
    """

    gap: Gap
    write_after: int | None
    read_at: int
    shares: tuple[Share, ...]


@dataclass(frozen=True, kw_only=True)
class Played:
    """Result of a replay. `stalls_s` has the seconds that each point waits, and `peak_bytes` the most memory in use."""

    step_s: float
    stalls_s: tuple[float, ...]
    peak_bytes: int
    written_bytes: int
    read_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan: which pieces leave memory in which gaps, what is computed again, the predicted step, and the reason."""

    program: Program
    moves: tuple[Move, ...]
    recomputed: tuple[Recomputation, ...]
    """The chosen recomputations of the program, each with only those of its pieces that no move takes."""
    played: Played
    reason: str


class LimitBelowLeastError(ValueError):
    """An error for a limit that no plan fits. `least_bytes` is the smallest possible limit, and `point` needs it."""

    def __init__(self, limit_bytes: int, least_bytes: int, point: str) -> None:
        self.limit_bytes, self.least_bytes, self.point = limit_bytes, least_bytes, point
        super().__init__(f"a limit of {limit_bytes} bytes is too small: {point} alone needs {least_bytes} bytes")


class UnplayableError(ValueError):
    """An error for a plan that cannot run: a point would wait forever, or use a piece that is not in memory."""


def ideal_s(points: Sequence[Point]) -> float:
    """Return the seconds of a step if memory had no limit."""
    return sum(point.seconds for point in points)
