"""What a job of the storm is started with besides: pipelines, a memory limit, drives to spill to, durable checkpoints.

None of it changes a bit, so that the undisturbed job of one is the same script without it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MEMORY = ("none", "ample", "tight")
CHECKPOINTS = ("none", "shared", "local")
EVERY = ("1", "2", "3", "1s")
"""Steps, or a time, from one checkpoint to the next."""
SLOW_FROM_STEP, SLOWER = 3, 12
AMPLE_BYTES = 64 << 30
SLACK_BYTES = (8 << 20, 16 << 20, 48 << 20)
"""Beyond what a first, undisturbed run of the job has held at most."""
FIRST_RUN_STEPS = 4
NO_ROOM = "too small"
"""Words of the sentence with which a job ends that has fewer members than it had when its limit was found."""


@dataclass(frozen=True, kw_only=True)
class Infrastructure:
    """Values of the command line."""

    stages: int = 1
    slows: str = ""
    """A member whose forwards take `SLOWER` times as long from a step on, so that blocks move away from it."""
    memory: str = "none"
    slack_bytes: int = 0
    """With `memory` tight."""
    spills: bool = False
    checkpoints: str = "none"
    """The layout of their directory."""
    every: str = ""
    device: str = "cpu"
    """Device of the members; the job of one computes on the CPU."""

    def options(self, folder: Path, limit_bytes: int | None) -> tuple[str, ...]:
        """Return the options of `elastrain run`, and make their folders and files."""
        found = ("--stages", str(self.stages)) if self.stages > 1 else ()
        if self.slows:
            faults = folder / "faults.txt"
            at = f"step={SLOW_FROM_STEP},phase=forward"
            faults.write_text(f"slow --target member:{self.slows} --at {at} --factor {SLOWER} --how sleep\n")
            found += ("--faults", str(faults))
        if limit_bytes is not None:
            found += ("--memory-limit", str(limit_bytes))
            found += ("--offload-dir", _made(folder / "spilled")) if self.spills else ()
        if self.checkpoints != "none":
            found += ("--checkpoint-dir", _made(folder / "checkpoints"), "--checkpoint-layout", self.checkpoints)
            found += ("--checkpoint-every", self.every)
        return found

    def on(self, device: str) -> Infrastructure:
        """The same on a device; elsewhere than on the CPU there are no memory limits."""
        return self if device == "cpu" else replace(self, device=device, memory="none", slack_bytes=0, spills=False)

    def __str__(self) -> str:
        memory = self.memory + (f" +{self.slack_bytes >> 20} MiB" if self.memory == "tight" else "")
        checkpoints = self.checkpoints + (f" every {self.every}" if self.every else "")
        spills = ", spilling" if self.spills else ""
        where = "" if self.device == "cpu" else f" on {self.device}"
        slow = f", {self.slows} slow" if self.slows else ""
        return f"{self.stages} stages{where}{slow}, memory {memory}{spills}, checkpoints {checkpoints}"


PLAIN = Infrastructure()


def draw_surroundings(chance: random.Random, *, may_have_stages: bool) -> Infrastructure:
    """`may_have_stages`: a pipeline's loop reads nothing of what it computes."""
    memory, checkpoints = chance.choice(MEMORY), chance.choice(CHECKPOINTS)
    return Infrastructure(
        stages=2 if may_have_stages and chance.random() < 0.5 else 1,
        memory=memory,
        slack_bytes=chance.choice(SLACK_BYTES) if memory == "tight" else 0,
        spills=memory != "none" and chance.random() < 0.7,
        checkpoints=checkpoints,
        every=chance.choice(EVERY) if checkpoints != "none" else "",
    )


def limit_of(surroundings: Infrastructure, peaks_bytes: Iterable[int], writing_bytes: int) -> int:
    """The tight limit, where members of a first run held so much; writing a checkpoint takes some besides."""
    return max(peaks_bytes) + surroundings.slack_bytes + (writing_bytes if surroundings.checkpoints != "none" else 0)


def peaks_of(journals: Iterable[Iterable[Mapping[str, Any]]]) -> list[int]:
    """What members said that they had held in their steps."""
    return [line["peak_bytes"] for lines in journals for line in lines if line["event"] == "memory"]


def _made(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return str(folder)
