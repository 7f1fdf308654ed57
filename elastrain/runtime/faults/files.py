"""One bit that changes in what a member has written of its job's durable checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.places.opening import place_at
from elastrain.snapshot.durable.publishing import visible


@dataclass(frozen=True, kw_only=True)
class WrittenFiles:
    """What this member has written of durable checkpoints in a place."""

    me: str
    place: str

    def flip(self, bit: int) -> str:
        """One bit in the middle of a file of the newest that is complete; why not, where there is none."""
        try:
            path = self._newest()
            if path is None:
                return f"{self.me} has written no file of a complete checkpoint in a folder yet"
            at = path.stat().st_size // 2
            with path.open("r+b") as file:
                file.seek(at)
                [byte] = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 1 << bit % 8]))
        except (CheckpointError, OSError) as error:
            return f"the files of {self.place} cannot be changed: {error}"
        return ""

    def _newest(self) -> Path | None:
        place = place_at(self.place)
        if not isinstance(place, LocalPlace):
            return None
        for name in reversed(visible(place)):
            for file in place.names(name):
                if file.startswith(f"part-{self.me}-"):
                    return Path(place.location, name, file)
        return None
