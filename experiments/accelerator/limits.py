"""The rows about memory limits: whether the device's peak keeps to the limit, and whether the bits stay."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.accelerator.jobs import Ran
from experiments.accelerator.measures import Bench
from experiments.accelerator.models import Training

DEEP = Training(model="deep", members=3, steps=5, micro_batches=3, backups="all", pause_s=0.02, peaks=True)
SHARE_OF_NEED = 0.6
DEADLINE_S = 240.0
PLACES = {"host memory", "drive"}
"""Places that have to hold something for the row to count."""
TIER = "8M"
"""Host memory above the drive: less than what has to leave, so that the drive gets the rest."""
KILLED = ("kill --target member:m1 --at step=2,phase=backward",)


@dataclass(frozen=True)
class Limited:
    """The training that is limited, and the bytes of the tier."""

    training: Training
    tier: str


def limits(bench: Bench, case: Limited | None = None) -> Mapping[str, Any]:
    """Run a job without a limit, with 60 % of what it needed and a loss, and with `save_on_disk` in its loop."""
    if case is None:
        case, bench = Limited(DEEP, TIER), replace(bench, deadline_s=DEADLINE_S)
    training = case.training
    free = bench.run("unlimited", training)
    need_bytes = highest_bytes(free)
    limit_bytes = int(SHARE_OF_NEED * need_bytes)
    drive = bench.folder / "drive"
    drive.mkdir(parents=True, exist_ok=True)
    options = ("--memory-limit", str(limit_bytes), "--host-tier", case.tier, "--offload-dir", str(drive))
    limited = bench.run("limited", training, options=options, faults=KILLED)
    saved = bench.run("saved", replace(training, saved=True))
    wanted = _digests(free)
    is_equal = all(_digests(ran) == wanted for ran in (limited, saved)) and len(wanted) == 1
    was_lost = not any(line.startswith(f"{training.steps} ") for line in limited.steps.get("m1", ()))
    left_to = _left_to(limited)
    kept = highest_bytes(limited) / limit_bytes if was_lost and left_to == PLACES else float("nan")
    return {
        "limit_kept": kept,
        "limit_bits_equal": float(is_equal),
        "limit_need_mb": need_bytes / 1e6,
        "limit_left_to": sorted(left_to),
    }


def highest_bytes(ran: Ran) -> int:
    """Return the most bytes that any member has held on its device."""
    return max(line["highest_bytes"] for lines in ran.facts.values() for line in lines if "highest_bytes" in line)


def _digests(ran: Ran) -> set[str]:
    """Return the digests at the end, of all members that saw it."""
    training = ran.job.training
    return {lines[-1] for lines in ran.steps.values() if lines and lines[-1].startswith(f"{training.steps} ")}


def _left_to(ran: Ran) -> set[str]:
    """Return the names of the places to which something has left the device: host memory, and the drive's folder."""
    profiles = [json.loads(path.read_text()) for path in ran.folder.rglob("offload/*.json")]
    places = [place for profile in profiles for place in profile["stats"]["devices"]]
    return {Path(place["name"]).name for place in places if place["written_bytes"]}
