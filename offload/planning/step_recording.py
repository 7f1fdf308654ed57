"""Recorded values of one step: operators with their seconds, and the birth, uses, changes and death of storages.

Pure values. Operators are numbered in the order in which they ran. A storage's places are such numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastrain.offload.planning.plan_values import Kind


@dataclass(frozen=True, kw_only=True)
class RecordedOperator:
    """One operator.

    `scope` is the recorder's label at that moment; `backward` is True if autograd's backward ran it.
    """

    name: str
    scope: str
    backward: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RecordedStorage:
    """One storage. `born` is None if it existed before the step, and `died` is None if it existed at the end.

    `uses` and `changes` are sorted. An operator that changes or creates a storage also uses it.
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
    """The recording of one step."""

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
"""The order of kinds in `Standing.held_bytes`."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Measurements at the end of a point. `held_bytes` is memory by kind, ordered as in `HELD`.

    `waited_s` and `moved_bytes` count since the point before. `moved_bytes` are bytes written and read, for each tier.
    """

    held_bytes: tuple[int, ...]
    waited_s: float
    moved_bytes: tuple[tuple[int, int], ...]
