"""What one step showed: its operators with their seconds, and when every storage was born, used, changed and freed.

Pure values. Operators are numbered in the order in which they ran; a storage's places are such numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from elastrain.offload.lifetimes.values import Kind


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

    def held_bytes(self) -> list[int]:
        """The bytes of all storages that were there while each operator ran."""
        change = [0] * (len(self.operators) + 1)
        for storage in self.storages:
            change[storage.born or 0] += storage.size_bytes
            if storage.died is not None and storage.died < len(self.operators):
                change[max(storage.died, storage.born or 0)] -= storage.size_bytes
        return list(accumulate(change))[:-1]

    def used_bytes(self) -> list[int]:
        """The bytes of the storages that each operator used."""
        found = [0] * len(self.operators)
        for storage in self.storages:
            for place in storage.uses:
                found[place] += storage.size_bytes
        return found

    def active_fraction(self) -> float:
        """Bytes in use over bytes held, the mean over operators: how much of memory a step really needs at a time."""
        pairs = [(used, held) for used, held in zip(self.used_bytes(), self.held_bytes(), strict=True) if held]
        return sum(used / held for used, held in pairs) / max(1, len(pairs))

    def bytes_of(self, kind: Kind) -> int:
        """All storages of one kind together."""
        return sum(storage.size_bytes for storage in self.storages if storage.kind is kind)
