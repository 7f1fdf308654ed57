"""Does a job on a device keep the guarantees of one on the CPU? See README.md.

`python -m experiments.accelerator.run [--quick] [--seed S] [--only KEY …] [--before FOLDER] [--floor PYTHON]
[--record]`.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.accelerator import measures
from experiments.accelerator.cases import Case, all_cases, reference_of, run_case
from experiments.accelerator.checkouts import cpu_price
from experiments.accelerator.commands import Once, end_on_sigterm
from experiments.accelerator.in_place import carried_in_place
from experiments.accelerator.jobs import DEADLINE_S, Job, Ran, run_job, total
from experiments.accelerator.limits import limits
from experiments.accelerator.measures import Bench
from experiments.accelerator.models import Training
from experiments.accelerator.plants import PLANTS
from experiments.harness import Reach, add_record_flag, record, report
from tests.support import warm

_ALL, _NONE = Reach(limit=1, at_least=True), Reach(limit=0)
COUNTED = ("steps_lost", "samples_lost", "samples_repeated", "leftovers", "races", "host_touches")
"""Over all jobs that run."""
REACHES = {
    "digest_equal_cpu": _ALL,
    "digest_equal": _ALL,
    "resumed_equal": _ALL,
    **dict.fromkeys(COUNTED, _NONE),
    "planted": Reach(limit=20, at_least=True),
    "planted_found": _ALL,
    "waits_per_micro_batch": _NONE,
    "waits_per_step": Reach(limit=2),
    "boundary_waits": _NONE,
    "bytes_alone": _NONE,
    "bytes_out": Reach(limit=1.01),
    "bytes_in": Reach(limit=1.01),
    "tail_bytes": Reach(limit=0.10),
    "device_bytes": Reach(limit=1.02),
    "device_bytes_alone": Reach(limit=1.05),
    "hang_found_s": Reach(limit=0.5),
    "limit_kept": Reach(limit=1.0),
    "limit_bits_equal": _ALL,
    "shared_equal": _ALL,
    "shared_carried": _NONE,
    "floor": _ALL,
    "cpu_price": Reach(limit=1.01),
}
ON_DEMAND = ("floor", "cpu_price")
PARTS = {
    **measures.PARTS,
    "limits": (limits, ("limit_kept", "limit_bits_equal")),
    "shared": (carried_in_place, ("shared_carried",)),
}
CASES, PLANTED = ("digest_equal_cpu", "digest_equal", "resumed_equal", "shared_equal"), "planted_found"
QUICK_S, CUT_S = 205.0, 225.0
"""`--quick` begins nothing that would take longer than this, if it takes as long as the longest case so far. What runs
on a busy machine after the second time is cut off, and does not count."""
PLANT_DEADLINE_S = 60.0
SHOWN = 900


class OutOfTimeError(Exception):
    """A trial that was cut off, so that nothing is known of it."""


class Experiment:
    """The trials so far, with their results. Each case and planted bug is a trial, run by one of several threads.

    What still runs at the monotonic time `until_s` is cut off.
    """

    def __init__(self, folder: Path, device: str, start: Callable[..., Any], until_s: float) -> None:
        self.folder, self.device, self.start, self.until_s = folder, device, start, until_s
        self.passed: dict[str, list[bool]] = {}
        """Key -> what became of its trials."""
        self.amiss: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.measured: dict[str, Any] = {}
        self.compared = Once()
        """Jobs with which others are compared, by what they run."""
        self._lock = threading.Lock()

    def try_case(self, case: Case, number: int) -> None:
        """Run a case and judge it."""
        ran = run_case(case, self.folder / f"case-{number}", start=self.start, until_s=self.until_s)
        self._raise_if_cut(ran[-1])
        found = ran[-1].amiss(self._reference(case.job.training))
        with self._lock:
            self.amiss.append(found)
        self._tell(case.key, case.name, not found.get("digest"), found, ran[-1])

    def try_plant(self, name: str, number: int) -> None:
        """Plant a bug. It is found if the same job without it has nothing amiss, and the job with it has."""
        bug = PLANTS[name]
        troubles = (("m1", 2, bug.trouble),) if bug.trouble else ()
        how = {"model": bug.model, "members": bug.members, "steps": bug.steps, "slowness": bug.slowness}
        how["shared"] = "trusted" if bug.shared else ""
        training = Training(device=self.device, troubles=troubles, **how)
        job = Job(training=training, stages=bug.stages)
        clean = self._is_clean(job, bug.refused)
        ran = self._run(replace(job, training=replace(training, plant=name)), f"plant-{number}", PLANT_DEADLINE_S)
        found = ran.amiss(self._reference(training)) if ran.has_planted() else {}
        found.pop("leftovers", None)
        if bug.refused and bug.refused in ran.output:
            found = {}
        told = "the job without it has something amiss" if not clean else found or "nothing found"
        self._tell(PLANTED, name, clean and bool(found), told, ran)

    def measure(self, part: str, rounds: int) -> None:
        """Run a part of `measures`. Its figures are missing if its jobs do not end well."""
        how = {"device": self.device, "start": self.start, "rounds": rounds, "until_s": self.until_s}
        bench = Bench(folder=self.folder / part, **how)
        try:
            found = dict(PARTS[part][0](bench))
        except Exception:  # noqa: BLE001 - other parts are still measured
            self._raise_if_cut()
            print(f"FAILED {part}\n{traceback.format_exc()}", flush=True)
            found = {}
        for name, ran in list(bench.ran):
            self.amiss.append(
                {key: value for key, value in (("races", ran.races), ("host_touches", ran.touches)) if value}
            )
            if ran.races:
                print(f"RACES in {name}: {ran.races[:2]}", flush=True)
        print(f"{part}: {found}", flush=True)
        self.measured |= found

    def figures(self) -> dict[str, Any]:
        """Return the keys of the table that trials give."""
        found: dict[str, Any] = {key: sum(passed) / len(passed) for key, passed in self.passed.items()}
        if self.amiss:
            counts = total(self.amiss)
            found |= {key: counts[key] for key in COUNTED}
        return found

    def _tell(self, key: str, name: str, is_well: bool, found: Any, ran: Ran) -> None:
        with self._lock:
            self.passed.setdefault(key, []).append(is_well)
            amiss = not is_well or (key != PLANTED and found)
            if amiss:
                self.failed.append(f"{key}: {name}")
            where = f"\n    {ran.folder}" if amiss else ""
            print(f"{'FAILED' if amiss else 'ok    '} {key}: {name}: {str(found or '')[:SHOWN]}{where}", flush=True)
        if not amiss:
            shutil.rmtree(ran.folder.parent, ignore_errors=True)

    def _reference(self, training: Training) -> Ran:
        wanted = reference_of(training)
        make = partial(self._run, Job(training=wanted), f"reference-{wanted.model}-{wanted.micro_batches}")
        found: Ran = self.compared.get(wanted.to_json(), make)
        return found

    def _is_clean(self, job: Job, refused: str) -> bool:
        def try_it() -> bool:
            ran = self._run(job, f"clean-{uuid.uuid4().hex[:8]}")
            amiss = ran.amiss(self._reference(job.training))
            is_clean = refused in ran.output if refused else not amiss
            if not is_clean:
                print(f"AMISS without a planted bug: {job}: {str(amiss)[:SHOWN]}\n    {ran.folder}", flush=True)
            return is_clean

        return bool(self.compared.get(f"{job} {refused}", try_it))

    def _run(self, job: Job, name: str, deadline_s: float = DEADLINE_S) -> Ran:
        ran = run_job(job, self.folder / name, deadline_s=deadline_s, until_s=self.until_s, start=self.start)
        self._raise_if_cut(ran)
        return ran

    def _raise_if_cut(self, ran: Ran | None = None) -> None:
        """Raise OutOfTimeError if the time is over, and the job, if there is one, was killed for it."""
        if time.monotonic() >= self.until_s and (ran is None or ran.code is None):
            raise OutOfTimeError


def main() -> int:
    args = _arguments()
    end_on_sigterm()
    begun_s, seed = time.monotonic(), args.seed if args.seed is not None else random.randrange(1 << 16)
    keys = args.only or [key for key in REACHES if key not in ON_DEMAND]
    folder = args.keep or Path(tempfile.mkdtemp(prefix="elastrain-accelerator-"))
    cut_s = begun_s + CUT_S if args.quick else float("inf")
    experiment = Experiment(folder, args.device, subprocess.Popen if args.cold else warm.Popen, cut_s)
    print(f"seed {seed}; folders in {folder}", flush=True)
    parts = {part: its for part, (_, its) in PARTS.items() if set(its) & set(keys)}
    measure = {part: partial(experiment.measure, part, 1 if args.quick else 3) for part in parts}
    for part in set(measures.ALONE) & set(measure):
        measure.pop(part)()
    trials = _trials(experiment, keys)
    if args.quick:
        trials = _drawn(trials, random.Random(seed))
    until_s = begun_s + QUICK_S if args.quick else float("inf")
    _, cut = _run_all([*measure.values(), *(trial for _, trial in trials)], args.jobs, until_s)
    ran = sum(map(len, experiment.passed.values()))
    values = {"seed": seed, "planted": len(PLANTS), **experiment.measured, **experiment.figures()}
    values |= {"trials": len(trials), "trials_run": ran, "cut_off": cut, "failed": experiment.failed}
    print(f"{ran} of {len(trials)} cases and planted bugs were run (seed {seed}); {cut} jobs were cut off", flush=True)
    if args.before is not None:
        values |= cpu_price(args.before, folder, 9 if args.quick else 40)
    if args.floor is not None:
        quick = ["--quick", "--seed", str(seed)] if args.quick else []
        values |= measures.floor(args.floor, [*quick, *(["--record"] if args.record else [])])
    values["seconds"] = round(time.monotonic() - begun_s)
    if args.record:
        record("accelerator", values, quick=args.quick, settings={"device": args.device, "jobs": args.jobs})
    if not experiment.failed and args.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if report(values, {key: REACHES[key] for key in REACHES if key in keys or key in values}) else 1


def _trials(experiment: Experiment, keys: Sequence[str]) -> list[tuple[str, Callable[[], None]]]:
    """Return everything that can be drawn, each with its key. Rows that count over all jobs take all cases."""
    wanted = set(CASES) if set(COUNTED) & set(keys) else set(CASES) & set(keys)
    cases = [case for case in all_cases(experiment.device) if case.key in wanted]
    trials = [(case.key, partial(experiment.try_case, case, number)) for number, case in enumerate(cases)]
    if PLANTED in keys and experiment.device == "late":
        trials += [(PLANTED, partial(experiment.try_plant, name, number)) for number, name in enumerate(PLANTS)]
    return trials


def _drawn(trials: Sequence[tuple[str, Callable[[], None]]], chance: random.Random) -> list[Any]:
    """Return the trials in an order in which keys take turns."""
    shuffled = chance.sample(trials, len(trials))
    seen: Counter[str] = Counter()
    turns = []
    for key, trial in shuffled:
        turns.append((seen[key], key, trial))
        seen[key] += 1
    return [(key, trial) for _, key, trial in sorted(turns, key=lambda turn: turn[0])]


def _run_all(trials: Sequence[Callable[[], None]], jobs: int, until_s: float) -> tuple[int, int]:
    """Run trials, `jobs` at a time, and begin none that would not end in time.

    Returns how many began, and how many of these were cut off.
    """
    took_s = [0.0]
    cut = []

    def one(trial: Callable[[], None]) -> None:
        began_s = time.monotonic()
        if began_s + max(took_s) < until_s:
            try:
                trial()
            except OutOfTimeError:
                cut.append(trial)
            took_s.append(time.monotonic() - began_s)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, trials))
    return len(took_s) - 1, len(cut)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.accelerator.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="draw cases and planted bugs, for at most 240 s")
    parser.add_argument("--seed", type=int, help="of what is drawn")
    parser.add_argument("--only", nargs="+", choices=sorted(REACHES), metavar="KEY", help="these rows of the table")
    parser.add_argument("--device", choices=("late", "cpu"), default="late", help="cpu: to try the experiment itself")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="jobs at a time")
    parser.add_argument("--cold", action="store_true", help="start every process cold")
    parser.add_argument("--keep", type=Path, help="where the folders of all jobs stay")
    parser.add_argument("--before", type=Path, help="another checkout, for cpu_price")
    parser.add_argument("--floor", metavar="PYTHON", help="an interpreter with the oldest torch, for floor")
    add_record_flag(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
