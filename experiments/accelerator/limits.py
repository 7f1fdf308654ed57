"""The rows about memory limits: whether the device's peak keeps to the limit, and whether the bits stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from experiments.accelerator.jobs import Ran
from experiments.accelerator.measures import Bench
from experiments.accelerator.models import Training

DEEP = Training(model="deep", members=3, steps=5, micro_batches=3, backups="all", pause_s=0.02, peaks=True)
SHARE_OF_NEED = 0.6
TIER = "8M"
"""Host memory above the drive: less than what has to leave, so that the drive gets the rest."""
KILLED = ("kill --target member:m1 --at step=2,phase=backward",)


def limits(bench: Bench) -> Mapping[str, Any]:
    """Run a job without a limit, with 60 % of what it needed and a loss, and with `save_on_disk` in its loop."""
    free = bench.run("unlimited", DEEP)
    need_bytes = highest_bytes(free)
    limit_bytes = int(SHARE_OF_NEED * need_bytes)
    drive = bench.folder / "drive"
    drive.mkdir(parents=True, exist_ok=True)
    options = ("--memory-limit", str(limit_bytes), "--host-tier", TIER, "--offload-dir", str(drive))
    limited = bench.run("limited", DEEP, options=options, faults=KILLED)
    saved = bench.run("saved", replace(DEEP, saved=True))
    wanted = _digests(free)
    is_equal = all(_digests(ran) == wanted for ran in (limited, saved)) and len(wanted) == 1
    kept = highest_bytes(limited) / limit_bytes if len(limited.run.deaths_s) == 1 else float("nan")
    return {
        "limit_kept": kept,
        "limit_bits_equal": float(is_equal),
        "limit_need_mb": need_bytes / 1e6,
        "limit_left_by": sorted(_left_by(limited)),
    }


def highest_bytes(ran: Ran) -> int:
    """Return the most bytes that any member has held on its device."""
    return max(line["highest_bytes"] for lines in ran.facts.values() for line in lines if "highest_bytes" in line)


def _digests(ran: Ran) -> set[str]:
    """Return the digests at the end, of all members that saw it."""
    return {lines[-1] for lines in ran.steps.values() if lines and lines[-1].startswith(f"{DEEP.steps} ")}


def _left_by(ran: Ran) -> set[str]:
    """Return the places to which something has left the device."""
    found = set()
    for path in ran.folder.rglob("offload/*.json"):
        text = path.read_text()
        found |= {name for name in ("host memory", str(ran.folder.parent / "drive")) if f'"{name}"' in text}
    return found
