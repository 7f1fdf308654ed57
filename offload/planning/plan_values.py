"""What a plan is made from and what it says: points, pieces, uses, gaps, tiers, moves. Frozen values; no torch, no I/O.

A step is a ring of points: after the last one comes the first one of the next step. Places on it are numbers; one that
is not below the number of points lies in the next step, one below zero in the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise


class Kind(Enum):
    """What a piece holds."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    STATE = "optimizer state"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"


@dataclass(frozen=True, kw_only=True)
class Use:
    """One point needs the piece. It may change it, and it may not need what was in it before (`begins`)."""

    point: int
    changes: bool = False
    begins: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryPiece:
    """What moves as one: one block's parameters, say. `uses` are sorted by their points, one per point."""

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
    """What runs as one: a block's forward, say. `extra_bytes` is memory that it takes besides all pieces."""

    name: str
    seconds: float
    extra_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """Pieces that can be given up after point `after` and computed again in point `again`, at the cost of `seconds`.

    Each of them has its gap between just these two points, both in one step.
    """

    name: str
    pieces: tuple[int, ...]
    after: int
    again: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Program:
    """One step: its points in their order, and what they use."""

    points: tuple[Point, ...]
    pieces: tuple[MemoryPiece, ...]
    recomputations: tuple[Recomputation, ...] = ()

    def __post_init__(self) -> None:
        if any(use.point >= len(self.points) or use.point < 0 for piece in self.pieces for use in piece.uses):
            raise ValueError("a piece is used at a point that the program does not have")


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Where a piece may be out: between its use at `begin` and its next one at `end`, which may lie in the next step.

    `changed` is the last change before it, at `begin` or earlier; None where nothing ever changes the piece, so that
    one copy is good for ever.
    """

    piece: int
    begin: int
    end: int
    changed: int | None


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Where pieces go: a drive, or a share of host memory (`is_memory`). Rates are bytes per second.

    `duplex` says that reads and writes do not slow each other down. `capacity_bytes` None is no bound.
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
        """How long it takes to write so many bytes."""
        return self.latency_s + size_bytes / self.write_bytes_per_s

    def read_s(self, size_bytes: float) -> float:
        """How long it takes to read them back."""
        return self.latency_s + size_bytes / self.read_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a plan may use: memory, and tiers for what is out."""

    limit_bytes: int
    tiers: tuple[Tier, ...]


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a piece that one tier gets."""

    tier: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Move:
    """One gap in which a piece is out: from the end of point `gap.begin` on, or later, when its copy is written.

    Its copy is written after point `write_after`; None where the copy that is there is good. Reading begins with
    point `read_at`, at the latest `gap.end`.
    """

    gap: Gap
    write_after: int | None
    read_at: int
    shares: tuple[Share, ...]


@dataclass(frozen=True, kw_only=True)
class Played:
    """How a step goes under a plan: seconds in all, seconds that each point waits, and the most memory in use."""

    step_s: float
    stalls_s: tuple[float, ...]
    peak_bytes: int
    written_bytes: int
    read_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What leaves when and comes back when, what is computed again, how the step then goes, and why."""

    program: Program
    moves: tuple[Move, ...]
    recomputed: tuple[Recomputation, ...]
    """Of the program's, with those of their pieces that no move takes."""
    played: Played
    reason: str


class LimitBelowLeastError(ValueError):
    """No plan fits: `least_bytes` is the smallest limit for which there is one, and `point` is what needs so much."""

    def __init__(self, limit_bytes: int, least_bytes: int, point: str) -> None:
        self.limit_bytes, self.least_bytes, self.point = limit_bytes, least_bytes, point
        super().__init__(f"a limit of {limit_bytes} bytes is too small: {point} alone needs {least_bytes} bytes")


class UnplayableError(ValueError):
    """A plan cannot be carried out: somebody would wait for ever, or use what is not there."""


def ideal_s(points: Sequence[Point]) -> float:
    """A step's seconds where memory has no limit."""
    return sum(point.seconds for point in points)
