"""What one step showed: its operators with their seconds, and when every storage was born, used, changed and freed.

Pure values. Operators are numbered in the order in which they ran; a storage's places are such numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastrain.offload.planning.plan_values import Kind


@dataclass(frozen=True, kw_only=True)
class RecordedOperator:
    """One operator. `scope` is what was running, as whoever recorded named it; `backward` says that autograd ran it."""

    name: str
    scope: str
    backward: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RecordedStorage:
    """One storage. `born` None: it was there before; `died` None: it was there at the end.

    `uses` and `changes` are sorted; what an operator changes, or makes, it uses as well.
    """

    name: str
    kind: Kind
    size_bytes: int
    born: int | None
    died: int | None
    uses: tuple[int, ...]
    changes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One step."""

    operators: tuple[RecordedOperator, ...]
    storages: tuple[RecordedStorage, ...]

    def __post_init__(self) -> None:
        places, end = range(len(self.operators)), len(self.operators)
        for each in self.storages:
            if any(place not in places for place in (*each.uses, *each.changes)):
                raise ValueError(f"a storage ({each.name}) is used by an operator that was not recorded")
            if not 0 <= (each.born or 0) <= end or not 0 <= (each.died or 0) <= end or each.size_bytes < 0:
                raise ValueError(f"a storage ({each.name}) is born or freed outside of the step, or has no size")


HELD = (Kind.PARAMETER, Kind.GRADIENT, Kind.STATE, Kind.ACTIVATION, Kind.TEMPORARY)
"""The order in which memory is told by its kinds."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What was seen when a point ended: memory by kind, as `HELD` orders it, and what came since the point before.

    `moved_bytes` are bytes written and read, for each tier.
    """

    held_bytes: tuple[int, ...]
    waited_s: float
    moved_bytes: tuple[tuple[int, int], ...]
