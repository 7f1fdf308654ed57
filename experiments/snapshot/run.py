"""What do snapshots and checkpoints cost, and what do they catch?

`python -m experiments.snapshot.run [--quick] [--only PART …] [--folder FOLDER] [--record]`. Each part is a module
of its own; see README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness import ROOT, Reach, add_record_flag, record, report
from experiments.jobs import unwind_on_sigterm
from experiments.snapshot import copies, files, flips, lost, overhead, resumed, window

REACHES = {
    "overhead_b1": Reach(limit=1.03),
    "overhead_b2": Reach(limit=1.05),
    "overhead_b1_between": Reach(limit=1.07),
    "overhead_durable": Reach(limit=1.03),
    "durable_stall": Reach(limit=0.05),
    "window_steps": Reach(limit=1.5),
    "window_slowdown": Reach(limit=1.10),
    "copy_delay": Reach(limit=0.02),
    "copy_delay_busy": Reach(limit=0.02),
    "vs_torch_save": Reach(limit=50, at_least=True),
    "vs_dcp_async": Reach(limit=5, at_least=True),
    "restore_fraction": Reach(limit=0.6, at_least=True),
    "file_flips_missed": Reach(limit=0),
    "flips_missed": Reach(limit=0),
    "audit_missed": Reach(limit=0),
    "resume_digest_equal": Reach(limit=1, at_least=True),
    "lost_everything_s": Reach(limit=10),
}
Measure = Callable[[Path, bool], Mapping[str, Any]]
"""(folder of its own, quick) -> figures."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the experiment."""

    measure: Measure
    keys: tuple[str, ...]
    """What it measures, besides what these figures are made of."""
    in_quick: bool = False
    not_in_quick: tuple[str, ...] = ()
    """Keys that `--quick` leaves out though the part is in it."""


def _files(folder: Path, quick: bool) -> Mapping[str, Any]:
    return files.figures(folder, layers=20, rounds=3 if quick else 9, flips=50 if quick else 1000)


def _overhead(folder: Path, quick: bool) -> Mapping[str, Any]:
    # Twice as often in the short one: one checkpoint says little.
    load = overhead.Load(intervals=2, every=5) if quick else overhead.Load()
    kinds = ("b1", "durable") if quick else tuple(overhead.BACKUPS)
    return overhead.figures(folder, kinds=kinds, rounds=1 if quick else 3, load=load)


def _window(folder: Path, quick: bool) -> Mapping[str, Any]:
    return window.measure(folder, quick=quick)


def _copies(folder: Path, quick: bool) -> Mapping[str, Any]:
    return copies.figures(folder, rounds=1 if quick else 5)


def _flips(folder: Path, quick: bool) -> Mapping[str, Any]:
    found = flips.figures(folder, flips.KINDS[:1] if quick else flips.KINDS, file=not quick)
    return {**found, "flips_missed": found["flips"] - found["caught"]}


def _audits(folder: Path, quick: bool) -> Mapping[str, Any]:
    found = flips.audited(folder, flips.AUDITED_KINDS[:1] if quick else flips.AUDITED_KINDS)
    return {**found, "audit_missed": found["audit_flips"] - found["audit_caught"]}


def _resume(folder: Path, quick: bool) -> Mapping[str, Any]:
    return resumed.figures(folder, rounds=1 if quick else 8, kills=1 if quick else 3)


def _lost(folder: Path, quick: bool) -> Mapping[str, Any]:
    return lost.figures(folder, lost.QUICK if quick else lost.ALL)


PARTS = {
    "files": Part(
        measure=_files,
        keys=(
            "packed_ratio",
            "packed_cost",
            "restore_fraction",
            "file_flips",
            "file_flips_caught",
            "file_flips_missed",
        ),
        in_quick=True,
    ),
    "overhead": Part(
        measure=_overhead,
        keys=(
            "overhead_b1",
            "overhead_b2",
            "overhead_b1_between",
            "overhead_b2_between",
            "overhead_durable",
            "durable_stall",
            "vs_torch_save",
            "vs_dcp_async",
        ),
        in_quick=True,
        not_in_quick=("overhead_b1", "overhead_b2", "overhead_b1_between", "overhead_b2_between"),
    ),
    "window": Part(measure=_window, keys=("window_steps", "window_slowdown")),
    "copies": Part(measure=_copies, keys=("copy_delay", "copy_delay_busy")),
    "flips": Part(measure=_flips, keys=("flips", "caught", "flips_missed")),
    "audits": Part(measure=_audits, keys=("audit_flips", "audit_caught", "audit_missed")),
    "resume": Part(measure=_resume, keys=("resume_digest_equal", "resume_rounds", "resume_kills")),
    "lost": Part(measure=_lost, keys=("lost_everything_s",), in_quick=True),
}


def measured(folder: Path, name: str, quick: bool) -> dict[str, Any]:
    """One part's figures, or the reason why it has none: the other parts go on."""
    try:
        return dict(PARTS[name].measure(folder / name, quick))
    except (RuntimeError, ValueError, AssertionError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return {f"failed_{name}": str(error)[-500:]}


def reaches_of(names: list[str], quick: bool) -> dict[str, Reach]:
    """What the parts that run are to reach."""
    expected = [key for name in names for key in PARTS[name].keys]
    left_out = [key for name in names for key in PARTS[name].not_in_quick] if quick else []
    return {key: reach for key, reach in REACHES.items() if key in expected and key not in left_out}


def main() -> int:
    in_quick = [name for name, part in PARTS.items() if part.in_quick]
    parser = argparse.ArgumentParser(prog="python -m experiments.snapshot.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"≤ 90 s on 2 quiet cores: {', '.join(in_quick)}, short")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--folder", type=Path, default=ROOT, help="where to write: on the drive that is measured")
    add_record_flag(parser)
    args = parser.parse_args()
    unwind_on_sigterm()
    names = args.only or (in_quick if args.quick else list(PARTS))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix=".elastrain-snapshot-", dir=args.folder) as folder:
        for name in names:
            found |= measured(Path(folder), name, args.quick)
    if args.record:
        record("snapshot", found, quick=args.quick, settings={"parts": names})
    met = report(found, reaches_of(names, args.quick))
    return 0 if met or args.quick else 1


if __name__ == "__main__":
    sys.exit(main())
