"""The directory of a job's durable checkpoints, without files: what was written, what can be seen, what is damaged.

Which checkpoint is taken and which may go is decided by production's `choosing`, `pruning` and `tidying`, over the
port of places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from elastrain.runtime.durable import tidying
from elastrain.scaling import Scaler
from elastrain.snapshot.durable import choosing, pruning
from elastrain.snapshot.durable.manifest import MANIFEST, VERIFIED, name_of, place_in_time
from elastrain.snapshot.durable.publishing import visible
from tests.sim.member import Violation


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint has."""

    step: int
    states: tuple[int, ...]
    """Of each shard."""
    loop: str
    """With which the loop enters the next step."""
    scaler: Scaler | None
    """Of the next step."""
    is_spread: bool = False


@dataclass
class Folder:
    """Of one checkpoint, from its first part on."""

    parts: list[str] = field(default_factory=list)
    manifest: Manifest | None = None
    is_verified: bool = False
    is_damaged: bool = False
    """A bit of a part has flipped: whoever reads everything sees it."""

    @property
    def is_good(self) -> bool:
        return self.manifest is not None and not self.is_damaged


class Disk:
    """Shared by all nodes. `location`, `names`, `remove`: as the port of places has them."""

    location = "disk"

    def __init__(self) -> None:
        self.folders: dict[str, Folder] = {}
        self.is_full = False

    # ---- the port

    def names(self, folder: str = "") -> list[str]:
        if not folder:
            return sorted(self.folders)
        there = self.folders.get(folder)
        if there is None:
            return []
        return [*there.parts, *([MANIFEST] if there.manifest else []), *([VERIFIED] if there.is_verified else [])]

    def remove(self, name: str) -> None:
        folder, _, file = name.partition("/")
        there = self.folders.get(folder)
        if there is None:
            return
        if not file:
            del self.folders[folder]
        elif file == MANIFEST:
            there.manifest = None
        elif file == VERIFIED:
            there.is_verified = False
        else:
            there.parts.remove(file)

    # ---- what members write

    def write(self, life: int, step: int, part: str) -> None:
        self.folders.setdefault(name_of(life, step), Folder()).parts.append(f"part-{part}")

    def publish(self, life: int, manifest: Manifest) -> None:
        """Under its name; the same one again is right, where whoever made it visible could not tell the others."""
        there = self.folders.setdefault(name_of(life, manifest.step), Folder())
        if there.manifest is not None and there.manifest != manifest:
            raise Violation(f"the checkpoint of step {manifest.step} is replaced by another one")
        there.manifest = manifest

    def tidy(self, keep: int) -> None:
        """As the member that made the newest one visible does."""
        good = self.newest_good()
        with self._opened():
            tidying.tidy(self, keep=keep)  # type: ignore[arg-type]  # what it uses of the port
        if good is not None and good not in self.folders:
            raise Violation(f"{good} is removed, which is the newest good checkpoint")

    # ---- what launchers ask

    def newest_step(self) -> int | None:
        """As `launcher.checkpoints.newest_step`: of the newest one that looks whole."""
        with self._opened():
            found = choosing.choose([self], choosing.quick).checkpoint  # type: ignore[list-item]
        return None if found is None else found.manifest.step

    def start(self) -> str:
        """As `launcher.checkpoints.find_start` in a later life: the newest that is whole; empty where none is."""
        with self._opened():
            found: Any = choosing.choose([self], choosing.thorough).checkpoint  # type: ignore[list-item]
        return "" if found is None else str(found.name)

    def read(self, name: str) -> Manifest:
        """By a member that starts from it."""
        there = self.folders.get(name)
        if there is None or there.manifest is None:
            raise Violation(f"{name} is read, which is not there any more")
        return there.manifest

    # ---- for checks, and for faults

    def newest_good(self) -> str | None:
        """By the definition: a newer life is newer, whatever its step."""
        good = [name for name, folder in self.folders.items() if folder.is_good]
        return max(good, key=lambda name: place_in_time(name) or (0, 0), default=None)

    def damage_newest(self) -> bool:
        """A bit of the newest one flips."""
        there = visible(self)  # type: ignore[arg-type]
        if there:
            self.folders[there[-1]].is_damaged = True
        return bool(there)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Production's decisions see these folders as checkpoints."""
        opening = SimpleNamespace(open=lambda places, name: SimCheckpoint(places[0].folders[name], name))
        with ExitStack() as stack:
            for module in (choosing, tidying, pruning):
                stack.enter_context(patch.object(module, "Checkpoint", opening))
            stack.enter_context(patch.object(tidying, "mark_verified", _mark_verified))
            yield


class SimCheckpoint:
    """`Checkpoint`: what is asked of it to choose, and to remove others."""

    def __init__(self, folder: Folder, name: str) -> None:
        assert folder.manifest is not None
        self.name, self.manifest = name, folder.manifest
        self._folder = folder

    def look(self) -> Sequence[str]:
        """Sizes and names: a flipped bit does not show."""
        return []

    def verify(self, **_: bool) -> list[str]:
        return ["a frame is damaged"] if self._folder.is_damaged else []


def _mark_verified(place: Disk, name: str) -> None:
    place.folders[name].is_verified = True
