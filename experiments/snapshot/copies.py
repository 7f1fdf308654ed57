"""By how much copies to new holders delay micro-batches: a node is lost, and journals say when a member copied.

The jobs are those of `window`. In one kind an accelerator is a wait, and processors are idle beside it; in the other,
micro-batches compute all the time on as many cores as there are survivors, so that copies find none idle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.journals import Member, MicroBatch
from experiments.snapshot import window

STEPS = 8
KINDS = {"copy_delay": ("--wait-s", str(window.WAIT_S)), "copy_delay_busy": ("--wait-s", "0", "--rows", "64")}
"""Key -> what the script is told: with 64 rows a micro-batch computes for about 0.2 s on one core."""


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Micro-batches of one member, in seconds: from its first copy, sent or taken, to its last one, and around them."""

    copying: list[float]
    before: list[float]
    after: list[float]
    """Of the two steps that followed the last copy: the members are the same, and mostly the machine's load."""

    @property
    def delay(self) -> float:
        return statistics.median(self.copying) / statistics.median(self.after) - 1

    @property
    def delay_before(self) -> float:
        """Against the time before the loss, in which more members shared the cores."""
        return statistics.median(self.copying) / statistics.median(self.before) - 1


def beside(member: Member) -> Beside | None:
    """None where this member computed nothing between its first copy and its last, or nothing afterwards."""
    # All between the two: a micro-batch that has a copy in it would be a long one by that alone.
    if not member.copied_s:
        return None
    first_s, last_s = min(member.copied_s), max(member.copied_s)
    later = [each for each in member.micro_batches if each.started_s > last_s]
    steps = sorted({each.step for each in later})[:2]
    copying = [each for each in member.micro_batches if each.started_s <= last_s and each.ended_s >= first_s]
    before = [each for each in member.micro_batches if each.ended_s < first_s and each.step > 0]  # the first is slow
    after = [each for each in later if each.step in steps]
    return Beside(copying=_took(copying), before=_took(before), after=_took(after)) if copying and after else None


def _took(micro_batches: Iterable[MicroBatch]) -> list[float]:
    return [each.ended_s - each.started_s for each in micro_batches]


def figures(folder: Path, rounds: int) -> dict[str, Any]:
    """`copy_delay`, `copy_delay_busy` and what they are made of. Raises RuntimeError where a job ended badly."""
    found: dict[str, list[Beside]] = {key: [] for key in KINDS}
    for turn in range(rounds):
        for key, arguments in KINDS.items():
            course = window.play(folder / f"{key}-{turn}", steps=STEPS, arguments=arguments)
            found[key] += [b for b in map(beside, course.run.members.values()) if b is not None]
    told: dict[str, Any] = {"copy_load": os.getloadavg()[0]}
    for key, members in found.items():
        if not members:
            raise RuntimeError(f"{key}: no member copied anything while it computed")
        told[key] = statistics.median(each.delay for each in members)
        told[f"{key}_before"] = statistics.median(each.delay_before for each in members)
        told[f"{key}_all"] = [round(each.delay, 4) for each in members]
        told[f"{key}_micro_batches"] = sum(len(each.copying) for each in members)
        told[f"{key}_s"] = statistics.median(took_s for each in members for took_s in each.copying)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    with tempfile.TemporaryDirectory(prefix="elastrain-copies-") as name:
        print(json.dumps(figures(Path(name), parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
