"""A disk in memory, as the port of places has it; a bit of a file may flip."""

from __future__ import annotations

from typing import Protocol

from elastrain.snapshot.durable.errors import CheckpointError, DamagedError, TakenError
from elastrain.snapshot.durable.manifest import VERIFIED


class Fills(Protocol):
    """Who knows whether there is room."""

    is_full: bool


class MemoryPlace:
    """`CheckpointPlace`, but for holds: whose a disk is, nobody asks here."""

    def __init__(self, location: str, room: Fills) -> None:
        self.location, self.room = location, room
        self.files: dict[str, bytearray] = {}
        self.read_back: set[str] = set()
        """Checkpoints of which all that lies here was found good."""
        self._damaged: dict[str, bool] = {}
        """Path -> whether it was read back before."""

    # ---- the port

    def exists(self) -> bool:
        return True

    def names(self, folder: str = "") -> list[str]:
        if not folder:
            return sorted({path.partition("/")[0] for path in self.files})
        return sorted(path.partition("/")[2] for path in self.files if path.startswith(folder + "/"))

    def open(self, name: str) -> MemoryFile:
        if name not in self.files:
            raise CheckpointError(f"{self.location}/{name} is not there")
        return MemoryFile(self, name, self.files[name])

    def create(self, name: str) -> MemoryFile:
        return MemoryFile(self, name, bytearray())

    def remove(self, name: str) -> None:
        self.files.pop(name, None)
        self._damaged.pop(name, None)

    # ---- for faults and checks

    def good(self) -> list[str]:
        return [path for path in self.files if path not in self._damaged]

    def once_good(self) -> list[str]:
        """What is damaged since it was read back counts, too."""
        return [path for path in self.files if self._damaged.get(path, True)]

    def damage(self, which: int) -> bool:
        """Of the newest files first. What says that a checkpoint was verified has no bits that count."""
        files = sorted((path for path in self.good() if not path.endswith(VERIFIED)), reverse=True)
        if not files:
            return False
        path = files[which % len(files)]
        data = self.files[path]
        data[which * 7919 % len(data)] ^= 1
        self._damaged[path] = path.partition("/")[0] in self.read_back
        return True


class MemoryFile:
    """`Sink` until it is committed, and `Source`."""

    def __init__(self, place: MemoryPlace, name: str, data: bytearray) -> None:
        self._place, self._name, self._data = place, name, data

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    def write(self, data: memoryview) -> None:
        if self._place.room.is_full:
            raise CheckpointError(f"{self._place.location}/{self._name}: no space left on device")
        self._data += data

    def sync(self) -> None: ...

    def commit(self) -> None:
        if self._name in self._place.files:
            raise TakenError(f"{self._place.location}/{self._name} is there already")
        self._place.files[self._name] = self._data

    def discard(self) -> None: ...

    def read_into(self, view: memoryview, offset_bytes: int) -> None:
        if offset_bytes + view.nbytes > len(self._data):
            raise DamagedError(f"{self._place.location}/{self._name} is cut short")
        view[:] = self._data[offset_bytes : offset_bytes + view.nbytes]

    def close(self) -> None: ...
