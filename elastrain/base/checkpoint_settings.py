"""How a job writes durable checkpoints, as the launcher was asked: carried to its workers in their environment."""

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
    """`place`: a folder, or a URL. Without a number of steps or a time, only what the script asks for is written."""

    place: str
    every_steps: int = 0
    every_s: float = 0.0
    keep: int = 3
    keep_for_s: float | None = None
    """Older ones go, too; None: whatever their age."""
    layout: str = SHARED
    """`local`: each node has a disk of its own there, and every holder writes its copy."""
    source: str | None = None
    """Where disks are local, what this node has of the checkpoint to start from; None: they are not."""
    resumes: bool = False
    """The job goes on from what lies there, whoever wrote it."""
    resumed_job: str = ""
    """The job whose checkpoint, on other nodes' disks, it goes on from: what that job has left there is its own."""

    @property
    def is_local(self) -> bool:
        """Each node has a disk of its own there."""
        return self.layout == LOCAL

    def started_from(self, source: str | None = None) -> CheckpointOptions:
        """With the folder in which this node looks for what the job starts from: its own, unless another is named."""
        return replace(self, source=source or self.place) if self.is_local else self

    def on_node(self, node: str) -> CheckpointOptions:
        """Where several nodes are simulated on one machine, each has a folder of its own for its disk."""
        if not self.is_local:
            return self
        return replace(self, place=f"{self.place}/{node}", source=f"{self.source or self.place}/{node}")

    def environment(self) -> dict[str, str]:
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
    """Steps, or seconds of a time such as 30s, 5m, 1h or 2d; the other one is 0. Raises ValueError."""
    found = re.fullmatch(r"([1-9]\d{0,15})([smhd]?)", text)
    if found is None:
        raise ValueError(f"{text!r}: write a number of steps, or a time such as 30s, 5m, 1h or 2d")
    number, unit = int(found[1]), found[2]
    return (number, 0.0) if not unit else (0, number * _UNITS_S[unit])
