"""The directory of a job's durable checkpoints, without files: what was written, what can be seen, what is damaged.

Which checkpoint is taken and which may go is decided by production's `choosing` and `pruning`, over the
port of places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from elastrain.base.resume import Resume
from elastrain.errors import StateLostError
from elastrain.job.scaling import Scaler
from elastrain.launcher.shared.job_values import End, Life, Roster
from elastrain.snapshot.durable import retention
from elastrain.snapshot.durable.manifest import MANIFEST, VERIFIED, name_of, place_in_time
from elastrain.snapshot.durable.publishing import visible
from tests.sim.member import Violation

if TYPE_CHECKING:
    from tests.sim.job.agent import AgentProcess
    from tests.sim.job.member import MemberProcess

LACKING = "start the nodes that have it on their disks too"
"""Says a job that may not begin anew, and lacks nodes."""


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
            retention.tidy(self, keep=keep)  # type: ignore[arg-type]  # what it uses of the port
        if good is not None and good not in self.folders:
            raise Violation(f"{good} is removed, which is the newest good checkpoint")

    # ---- what launchers ask

    def newest_step(self, node: str) -> int | None:
        """As `launcher.checkpoints.newest_step`: of the newest one that looks whole."""
        with self._opened():
            found = retention.choose([self], retention.quick).checkpoint  # type: ignore[list-item]
        return None if found is None else found.manifest.step

    def with_start(self, life: Life, node: str, incarnation: int, least: str) -> Life:
        """As `launcher.checkpoints.find_start` in a later life: the newest that is whole, no older than `least`."""
        with self._opened():
            found: Any = retention.choose([self], retention.thorough).checkpoint  # type: ignore[list-item]
        name = "" if found is None else str(found.name)
        self._check_start(life.number, name, least)
        if not name:
            return replace(life, resume=None)
        step = (place_in_time(name) or (0, -1))[1]
        return replace(life, resume=Resume(place="disk", name=name, step=step))

    def _check_start(self, number: int, name: str, least: str) -> None:
        if name and not self.folders[name].is_good:
            raise Violation(f"life {number} starts from {name}, which is damaged")
        there = self.folders.get(least)
        if there is not None and there.is_good and (place_in_time(name) or (0, 0)) < (place_in_time(least) or (0, 0)):
            raise Violation(f"life {number} starts from {name or 'nothing'}, though {least} is newer and good")

    def begin(self, life: Life, roster: Roster) -> Manifest | None:
        """A life starts from what its roster says."""
        return None if roster.resume is None else self._read(roster.resume.name)

    def trouble(self, process: MemberProcess, resume: Resume) -> Exception | None:
        """Whoever reads what a life starts from sees that it is damaged."""
        damaged = self.folders[resume.name].is_damaged
        return StateLostError("the checkpoint that this job starts from is damaged") if damaged else None

    def is_waited_for(self, resume: Resume) -> bool:
        return False

    def check_end(self, agent: AgentProcess, end: End) -> None:
        """Of a job: what it says of nodes' own disks is right."""
        if LACKING in end.sentence:
            raise Violation(f"{agent.name} misses nodes, though no disk is a node's own: {end.sentence}")

    def _read(self, name: str) -> Manifest:
        there = self.folders.get(name)
        if there is None or there.manifest is None:
            raise Violation(f"{name} is read, which is not there any more")
        return there.manifest

    # ---- for checks, and for faults

    def newest_good(self, node: str = "") -> str | None:
        """By the definition: a newer life is newer, whatever its step."""
        good = [name for name, folder in self.folders.items() if folder.is_good]
        return max(good, key=lambda name: place_in_time(name) or (0, 0), default=None)

    def damage_newest(self) -> bool:
        """A bit of the newest one flips."""
        there = visible(self)  # type: ignore[arg-type]
        if there:
            self.folders[there[-1]].is_damaged = True
        return bool(there)

    def opened(self) -> AbstractContextManager[None]:
        """For the whole job: nothing, since each decision is made over these folders by itself."""
        return nullcontext()

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Production's decisions see these folders as checkpoints."""
        opening = SimpleNamespace(open=lambda places, name: SimCheckpoint(places[0].folders[name], name))
        with ExitStack() as stack:
            for module in (retention, retention):
                stack.enter_context(patch.object(module, "Checkpoint", opening))
            stack.enter_context(patch.object(retention, "mark_verified", _mark_verified))
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
