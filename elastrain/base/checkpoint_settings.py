"""Settings for durable checkpoints. The launcher passes them to its workers in environment variables."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

DIR, EVERY, KEEP, KEEP_FOR, LAYOUT, SOURCE = (
    f"ELASTRAIN_CHECKPOINT_{name}" for name in ("DIR", "EVERY", "KEEP", "KEEP_FOR", "LAYOUT", "SOURCE")
)
SHARED, LOCAL = LAYOUTS = ("shared", "local")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Settings for durable checkpoints of one job.

    `place` is a folder or a URL. If both `every_steps` and `every_s` are 0, only checkpoints that the script requests
    are written. `keep` is the number of checkpoints to keep.
    """

    place: str
    every_steps: int = 0
    every_s: float = 0.0
    keep: int = 3
    keep_for_s: float | None = None
    """Checkpoints older than this are removed too. None: age does not matter."""
    layout: str = SHARED
    """`local` if `place` lies on a separate disk of each node; then every holder writes its copy. Else `shared`."""
    source: str | None = None
    """The folder with this node's parts of the checkpoint to start from, under layout `local`. None under `shared`."""
    resumes: bool = False
    """True if the job resumes from a checkpoint in `place`, whichever job wrote it."""
    resumed_job: str = ""
    """Name of the resumed job, if its checkpoint lies on the disks of the nodes.

    This job treats its files as its own.
    """

    @property
    def is_local(self) -> bool:
        """True if `place` lies on a separate disk of each node."""
        return self.layout == LOCAL

    def started_from(self, source: str | None = None) -> CheckpointOptions:
        """Return these settings with the folder that this node starts from: `source`, or `place` if it is None."""
        return replace(self, source=source or self.place) if self.is_local else self

    def on_node(self, node: str) -> CheckpointOptions:
        """Return these settings for a simulated node: with layout `local`, each has a folder of its own."""
        if not self.is_local:
            return self
        return replace(self, place=f"{self.place}/{node}", source=f"{self.source or self.place}/{node}")

    def environment(self) -> dict[str, str]:
        """Return these settings as environment variables for a worker."""
        every = str(self.every_steps) if self.every_steps else f"{self.every_s:.0f}s" if self.every_s else ""
        age = "" if self.keep_for_s is None else str(self.keep_for_s)
        return {
            DIR: self.place,
            EVERY: every,
            KEEP: str(self.keep),
            KEEP_FOR: age,
            LAYOUT: self.layout,
            SOURCE: self.source or "",
        }


def parse_every(text: str) -> tuple[int, float]:
    """Parse a number of steps, or a time such as 30s, 5m, 1h or 2d.

    Returns (steps, 0) or (0, seconds). Raises ValueError for any other text.
    """
    found = re.fullmatch(r"([1-9]\d{0,15})([smhd]?)", text)
    if found is None:
        raise ValueError(f"{text!r}: write a number of steps, or a time such as 30s, 5m, 1h or 2d")
    number, unit = int(found[1]), found[2]
    return (number, 0.0) if not unit else (0, number * _UNITS_S[unit])
