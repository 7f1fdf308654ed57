"""The file that a run leaves for `elastrain offload show`: what happened, as JSON, replaced as a whole. No torch here.

In a worker of `elastrain run` it lies in the run's folder, `offload/<member>.json`; alone, where it was asked for.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path as FilePath
from typing import Any

from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.stats import DeviceStats, Lifetime, OffloadStats, PassProfile, Path

FORMAT = 1
WRITE_EVERY_S = 5.0
"""A profile of a thousand storages takes a few milliseconds to write."""
_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Place:
    """How much of one kind of state is in memory and how much on disk, in bytes."""

    what: str
    memory_bytes: int
    disk_bytes: int


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One process: its activations, what else it holds and where, and why."""

    stats: OffloadStats
    places: tuple[Place, ...] = ()
    reason: str = ""
    host: str = ""
    """The machine whose drives these are."""


def default_file() -> FilePath | None:
    """Where a worker of `elastrain run` leaves its profile; None elsewhere. A second offload gets a second file."""
    folder, member = os.environ.get("ELASTRAIN_RUN_DIR"), os.environ.get("ELASTRAIN_MEMBER", "m0")
    if not folder:
        return None
    number = next(_numbers)
    return FilePath(folder) / "offload" / (f"{member}.json" if number == 1 else f"{member}-{number}.json")


class ProfileFile:
    """Where profiles go, and when one is due; None takes none. Holds nothing of what it describes."""

    def __init__(self, path: FilePath | None, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._due_s = clock() + WRITE_EVERY_S

    def offer(self, take: Callable[[], Profile]) -> None:
        """A moment at which the profile may be written."""
        if self._clock() >= self._due_s:
            self.write(take)

    def write(self, take: Callable[[], Profile]) -> None:
        """Write it now: whole or not at all. Raises OSError."""
        if self._path is None:
            return
        self._due_s = self._clock() + WRITE_EVERY_S
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        fresh = self._path.with_name(f".{self._path.name}.new")
        fresh.write_text(encode(take()))
        fresh.replace(self._path)


def encode(profile: Profile) -> str:
    """One JSON object."""
    return json.dumps({"format": FORMAT, **asdict(profile)}, default=_plain, separators=(",", ":"))


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} has no place in a profile")


def read(file: FilePath) -> Profile:
    """Raises OffloadConfigError, in one sentence, if there is no profile that can be read."""
    try:
        told = json.loads(file.read_text())
        if told.pop("format", None) != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        return Profile(
            stats=_stats(told["stats"]),
            places=tuple(Place(**each) for each in told["places"]),
            reason=str(told["reason"]),
            host=str(told.get("host", "")),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise OffloadConfigError(f"{file} holds no profile of an offload that can be read ({error!r})") from None


def _stats(told: Mapping[str, Any]) -> OffloadStats:
    last = told["last"]
    return OffloadStats(
        **{
            **told,
            "faults": tuple(told["faults"]),
            "devices": tuple(DeviceStats(**{**each, "packing": tuple(each["packing"])}) for each in told["devices"]),
            "last": None if last is None else _pass(last),
        }
    )


def _pass(told: Mapping[str, Any]) -> PassProfile:
    return PassProfile(
        **{
            **told,
            "lifetimes": tuple(Lifetime(**{**each, "path": Path(each["path"])}) for each in told["lifetimes"]),
            "timeline": tuple((float(at_s), int(live)) for at_s, live in told["timeline"]),
        }
    )
