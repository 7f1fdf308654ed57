"""Random models under random kills: is the result ever not that of an undisturbed job of one?

`python -m experiments.storm.run [--seed S] [--minutes N] [--case SEED] [--device late]
[--pipelines] [--record]`. What is drawn stands in `cases.py`;
what one case does in `one.py`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.harness import Reach, add_record_flag, record, report
from experiments.jobs import unwind_on_sigterm
from experiments.storm.cases import Case, draw
from experiments.storm.one import run_case
from experiments.storm.oracle import Outcome

REACHES = {name: Reach(limit=0) for name in ("digest_mismatches", "hangs", "false_ends", "leftovers")}
CASES_PER_SEED = 10_000


def figures(outcomes: Sequence[Outcome], cases: Sequence[Case], seconds: float) -> dict[str, Any]:
    """The keys of the README."""
    kinds = Counter(f"{fault.kind} {fault.target}" for case in cases for fault in case.faults)
    shapes = Counter(f"{case.nodes} nodes, backups={case.training.backups}" for case in cases)
    started = Counter(str(case.started) for case in cases)
    return {
        "runs": len(outcomes),
        "kills": sum(outcome.kills for outcome in outcomes),
        "stops": sum(outcome.stops for outcome in outcomes),
        "commits": sum(outcome.commits for outcome in outcomes),
        "digest_mismatches": sum(bool(outcome.mismatch) for outcome in outcomes),
        "hangs": sum(bool(outcome.hang) for outcome in outcomes),
        "false_ends": sum(bool(outcome.false_end) for outcome in outcomes),
        "leftovers": sum(len(outcome.leftovers) for outcome in outcomes),
        "too_slow": sum(bool(outcome.too_slow) for outcome in outcomes),
        "no_room": sum(bool(outcome.no_room) for outcome in outcomes),
        "seconds": round(seconds, 1),
        "failed_cases": [outcome.seed for outcome in outcomes if outcome.failed],
        "faults_drawn": dict(sorted(kinds.items())),
        "jobs_drawn": dict(sorted(shapes.items())),
        "started_with": dict(sorted(started.items())),
    }


def storm(
    seeds: Iterable[int], folder: Path, *, minutes: float, faithful: bool, device: str = "cpu"
) -> tuple[list[Outcome], list[Case]]:
    """One case after another until the time is over; at least one. With `faithful`, say all that was done."""
    begun_s = time.monotonic()
    outcomes: list[Outcome] = []
    cases: list[Case] = []
    for seed in seeds:
        spent_s = time.monotonic() - begun_s
        if outcomes and spent_s + max(outcome.seconds for outcome in outcomes) / 2 > minutes * 60:
            break
        case = draw(seed)
        case = replace(case, started=case.started.on(device))
        cases.append(case)
        outcome = run_case(case, folder / str(seed))
        outcomes.append(outcome)
        _tell(case, outcome, folder / str(seed), fully=faithful)
        if not outcome.failed:
            shutil.rmtree(folder / str(seed))
    return outcomes, cases


def _tell(case: Case, outcome: Outcome, folder: Path, *, fully: bool) -> None:
    verdict = (
        "FAILED" if outcome.failed else "too slow" if outcome.too_slow else "no room" if outcome.no_room else "equal"
    )
    print(
        f"case {case.seed}: {verdict}; {case.workers} workers, {case.nodes} nodes, backups={case.training.backups}, "
        f"{case.started}, {case.model.shape}; {outcome.kills} kills, {outcome.stops} stops, {outcome.commits} commits, "
        f"{outcome.seconds:.0f} s",
        flush=True,
    )
    if outcome.failed or fully:
        print("\n".join([str(case), *(f"  {line}" for line in (*outcome.struck, *outcome.sentences()))]), flush=True)
    if outcome.failed:
        on = "" if case.started.device == "cpu" else f" --device {case.started.device}"
        print(f"  again: python -m experiments.storm.run --case {case.seed}{on}; kept in {folder}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.storm.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which cases: seed · 10,000 and the following")
    parser.add_argument("--minutes", type=float, default=10.0, help="no new case when they are over")
    parser.add_argument("--pipelines", action="store_true", help="only the cases that train in a pipeline")
    parser.add_argument("--case", type=int, help="this one only")
    parser.add_argument(
        "--device", choices=("cpu", "late"), default="cpu", help="of the members, not of the job of one"
    )
    parser.add_argument("--times", type=int, default=1, help="with --case: so often")
    parser.add_argument(
        "--keep", type=Path, help="where the folders of failing cases stay; default: a temporary folder"
    )
    add_record_flag(parser)
    args = parser.parse_args()
    unwind_on_sigterm()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="elastrain-storm-"))
    begun_s = time.monotonic()
    if args.case is None:
        first = args.seed * CASES_PER_SEED
        seeds: Iterable[int] = range(first, first + CASES_PER_SEED)
        if args.pipelines:
            seeds = (seed for seed in seeds if draw(seed).started.stages > 1)
        outcomes, cases = storm(seeds, folder, minutes=args.minutes, faithful=False, device=args.device)
    else:
        outcomes, cases = [], []
        for time_ in range(args.times):
            some, drawn = storm(
                [args.case], folder / f"{time_}", minutes=args.minutes, faithful=True, device=args.device
            )
            outcomes, cases = outcomes + some, cases + drawn
    values = figures(outcomes, cases, time.monotonic() - begun_s)
    if args.record:
        settings = {key: getattr(args, key) for key in ("seed", "minutes", "case", "device", "pipelines")}
        record("storm", values, quick=args.minutes < 10, settings=settings)
    if not values["failed_cases"]:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if report(values, REACHES) else 1


if __name__ == "__main__":
    sys.exit(main())
