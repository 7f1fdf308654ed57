"""Every class of faults in every phase, on real processes: does the job answer as it is promised?

`python -m experiments.faults.run [--quick] [--only CLASS …] [--phase P …] [--list] [--record]`. See README.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.faults import healthy, trials
from experiments.faults.cells import QUICK, Cell, Ground, chosen, legal_cells
from experiments.faults.driver import STOPPING
from experiments.faults.figures import HANGS, Outcome, figures, is_in_a_step
from experiments.harness import Reach, add_record_flag, record, report
from experiments.jobs import unwind_on_sigterm
from tests.support import warm

REACHES = {name: Reach(limit=0) for name in ("failed", "digest_mismatches", "lost_samples", "hangs", "leftovers")}
REACHES |= {
    "false_evictions": Reach(limit=0),
    "detect_crash_s": Reach(limit=0.02),
    "detect_hang_s": Reach(limit=3),
    "detect_hang_between_steps_s": Reach(limit=33),
    "detect_blackhole_s": Reach(limit=3),
}


ONLY = "these classes, or ways such as 'hang --how lock'; or healthy: no fault at all"


def run_cells(cells: Sequence[Cell], folder: Path, patience: float) -> tuple[list[Outcome], float | None]:
    """All grounds at once: most of the time is waiting. Hangs are timed, so they come afterwards, with nothing beside
    them but the jobs of other hangs. The outcomes, and the median time between two commits.
    """
    warm.run(
        [sys.executable, "-c", ""], timeout=120, env={**os.environ, **warm.THERE}
    )  # not within a job's first seconds
    with ThreadPoolExecutor() as threads:
        references = {
            script: threads.submit(trials.reference, folder / f"alone-{ground}", ground)
            for script, ground in {trials.script(cell.way.ground): cell.way.ground for cell in cells}.items()
        }
        setting = trials.Setting(
            folder=folder,
            reference=lambda ground: references[trials.script(ground)].result(),
            patience=patience,
            tell=tell,
        )
        found = []
        for timed in (False, True):
            part = [cell for cell in cells if is_timed(cell) is timed]
            there = replace(setting, folder=folder / "timed") if timed else setting
            grounds = {ground: [cell for cell in part if cell.way.ground is ground] for ground in Ground}
            running = [threads.submit(trials.run_all, mine, at, there) for at, mine in grounds.items() if mine]
            found += [each.result() for each in running]
    outcomes = [outcome for some, _ in found for outcome in some if not outcome.cut_short]
    walls_s = [wall_s for _, some in found for wall_s in some]
    return outcomes, statistics.median(walls_s) if walls_s else None


def is_timed(cell: Cell) -> bool:
    """Whether its time until it is detected counts, and is long enough for what runs beside it to matter."""
    return cell.way.kind in HANGS and is_in_a_step(cell)


def tell(outcome: Outcome) -> None:
    """A line per cell as soon as its job is judged."""
    times = f"{outcome.standstill_s:6.2f} s" if outcome.standstill_s is not None else f"{'':>8}"
    print(f"{outcome.cell!s:<50}{times}  {'as promised' if outcome.passed else 'FAILED'}", flush=True)
    if outcome.nothing_struck:
        print(f"{'':<4}nothing was struck: {outcome.nothing_struck}", flush=True)
    if outcome.reason:
        print(f"{'':<4}{outcome.reason}", flush=True)


def wanted(args: argparse.Namespace) -> list[Cell]:
    """The cells that the command line asks for."""
    cells = legal_cells()
    if args.quick:
        cells = chosen(cells, QUICK)
    matches: list[Callable[[Cell], bool]] = [
        lambda cell: not args.only or cell.way.kind in args.only or cell.way.name in args.only,
        lambda cell: not args.phase or cell.phase in args.phase,
        lambda cell: not args.ground or cell.way.ground in args.ground,
    ]
    return [cell for cell in cells if all(match(cell) for match in matches)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.faults.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one cell of every kind, in at most 90 s on quiet cores")
    parser.add_argument("--list", action="store_true", help="print the legal cells and end")
    parser.add_argument("--only", nargs="+", metavar="CLASS", help=ONLY)
    parser.add_argument("--phase", nargs="+", help="these phases")
    parser.add_argument("--ground", nargs="+", choices=list(Ground), help="these kinds of jobs")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies all times; more on a busy machine")
    parser.add_argument("--minutes", type=float, default=30.0, help="of '--only healthy': so long without any fault")
    parser.add_argument("--keep", type=Path, help="where folders of jobs stay; default: a temporary folder")
    add_record_flag(parser)
    args = parser.parse_args()
    cells = wanted(args)
    if args.list:
        print("\n".join(f"{cell.way.ground:<8}{cell!s:<56}{cell.way.answer}" for cell in cells))
        return 0
    folder = args.keep or Path(tempfile.mkdtemp(prefix="elastrain-faults-"))
    begun_s = time.monotonic()
    values: dict[str, Any] = {}
    if args.only == ["healthy"]:
        unwind_on_sigterm()
        values = healthy.measured(folder / "healthy", args.minutes)
    else:
        for number in (signal.SIGTERM, signal.SIGINT):  # what has been found until then is told
            signal.signal(number, lambda *_: STOPPING.set())
        outcomes, usual_s = run_cells(cells, folder, args.patience)
        values = figures(outcomes, usual_s=usual_s, legal=len(legal_cells()))
    values["seconds"] = round(time.monotonic() - begun_s, 1)
    if args.record:
        settings = {"quick": args.quick, "only": args.only, "phase": args.phase, "ground": args.ground}
        settings |= {"patience": args.patience, "steps": trials.STEPS}
        record("faults", values, quick=args.quick, settings=settings)
    if values.get("failed"):
        print(f"the folders of the jobs are in {folder}")
    elif args.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if report(values, {key: reach for key, reach in REACHES.items() if values.get(key) is not None}) else 1


if __name__ == "__main__":
    sys.exit(main())
