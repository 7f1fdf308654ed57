"""Mixed faults every few seconds on three nodes: right to the end, and does nothing grow?

`python -m experiments.soak.run [--minutes N] [--mtbf S] [--seed S] [--record]`. See README.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.faults import train
from experiments.faults.driver import LEARNED_STEPS, Driver
from experiments.faults.figures import commits_s, put_right, standstill_s, without_flipped, without_put_right
from experiments.faults.trials import ORDER
from experiments.harness import Reach, add_record_flag, record, report
from experiments.jobs import Script, alone, elastic, finish, unwind_on_sigterm
from experiments.journals import Run
from experiments.recovery.figures import wrong_samples
from experiments.soak.figures import Sample, figures
from experiments.soak.looking import look
from experiments.soak.striking import ChaosCommand, Strikes, chaos
from experiments.storm.oracle import difference, read_steps, unfinished
from experiments.storm.processes import MARK, Processes, leftovers

NODES = 3
STEPS = 1_000_000
"""More than any soak has; a file says which step is the last."""
LOOK_EVERY_S, SAMPLE_EVERY_S = 0.1, 10.0
STILL_S, START_S, END_S = 120.0, 180.0, 60.0
REACHES = {
    name: Reach(limit=0)
    for name in ("digest_mismatches", "samples_wrong_steps", "hangs", "false_ends", "leftovers", "grown")
}
REACHES["faults"] = Reach(limit=300, at_least=True)


@dataclass(kw_only=True)
class Soak:
    """What was seen."""

    run: Run
    strikes: Strikes = field(default_factory=Strikes)
    samples: list[Sample] = field(default_factory=list)
    hang: str = ""
    code: int | None = None
    mismatch: str = ""
    last_words: str = ""
    leftovers: tuple[str, ...] = ()


def soak(folder: Path, *, minutes: float, mtbf_s: float, seed: int) -> Soak:
    """Train under chaos for so long, let the job end, and compare every step with the job of one."""
    run, temporary = folder / "run", folder / "tmp"
    run.mkdir(parents=True)
    temporary.mkdir()
    (run / "brake").touch()
    mark = uuid.uuid4().hex
    processes = Processes(mark)
    script = Script(path=Path(train.__file__), args=(str(STEPS),))
    options = ("--inject", "--max-restarts", "1000000")
    extra = {MARK: mark}
    with elastic(
        run, script, members=NODES, nodes=NODES, options=options, temporary=temporary, environment=extra
    ) as process:
        driver = Driver(folder=run, process=process, size=NODES, steps=STEPS)
        found = Soak(run=driver.run)
        try:
            _wait_for_pace(found, driver)
            if not found.hang:
                with chaos(run, folder / "chaos.jsonl", minutes=minutes, mtbf_s=mtbf_s, seed=seed) as command:
                    found.strikes = command.strikes
                    _follow(found, driver, processes, command, minutes * 60)
        finally:
            if process.poll() is None:
                processes.end()
    found.code = process.returncode
    driver.follower.look()
    found.last_words = (run / "output.log").read_text(errors="replace")[-2000:]
    if not found.hang:
        found.leftovers = leftovers(processes, run, temporary, "")
    processes.end()
    found.mismatch = _compare(found, folder, script)
    return found


def _wait_for_pace(found: Soak, driver: Driver) -> None:
    """Until the agents know how long a step takes, by which they judge hangs."""
    begun_s = time.monotonic()
    while driver.alive and len(commits_s(driver.follower.look())) < LEARNED_STEPS:
        if time.monotonic() - begun_s > START_S:
            found.hang = f"no {LEARNED_STEPS} commits within {START_S:.0f} s"
            return
        time.sleep(LOOK_EVERY_S)


def _follow(found: Soak, driver: Driver, processes: Processes, command: ChaosCommand, for_s: float) -> None:
    """To the job's end, or until it stands still."""
    begun_s = sampled_s = time.monotonic()
    enough = False
    while driver.alive:
        now_s, commits = time.monotonic(), commits_s(driver.follower.look())
        command.look()
        if not enough and now_s - begun_s > for_s:
            driver.end_soon()
            enough = True
        if now_s - sampled_s > SAMPLE_EVERY_S:
            found.samples.append(_sample(driver, processes, now_s - begun_s))
            sampled_s = now_s
        if now_s - commits[-1] > STILL_S:
            found.hang = f"no commit for {now_s - commits[-1]:.0f} s after {len(commits)} commits"
            return
        time.sleep(LOOK_EVERY_S)
    command.finish(END_S)


def _sample(driver: Driver, processes: Processes, at_s: float) -> Sample:
    workers = {pid for name, pid in driver.run.pids.items() if name not in driver.run.deaths_s}
    return look(at_s, processes.all(), workers, (driver.folder, driver.folder.parent / "tmp"))


def _compare(found: Soak, folder: Path, script: Script) -> str:
    """Every line of every member against the job of one, up to the same step."""
    enough = folder / "run" / "enough"
    told = without_flipped(read_steps(folder / "run"), found.run, found.strikes.flipped_s)
    members = without_put_right(told, found.run)
    (folder / "alone").mkdir(exist_ok=True)
    last = max((int(lines[-1].split()[0]) for lines in members.values() if lines), default=-1)
    (folder / "alone" / "enough").write_text(enough.read_text() if enough.exists() else str(last + 1))
    with alone(folder / "alone", script) as process:
        finish(process, folder / "alone", timeout_s=7200)
    reference = read_steps(folder / "alone")["alone"]
    return difference(members, reference) or (unfinished(members, reference) if enough.exists() else "")


def values_of(found: Soak) -> dict[str, Any]:
    """The keys of the README."""
    commits = commits_s(found.run)
    members = found.run.members.values()
    strikes = found.strikes
    return {
        "faults": len(strikes.struck),
        "refused": len(strikes.refused),
        "faults_by_class": strikes.by_class(),
        "refused_because": strikes.by_refusal(),
        "commits": len(commits),
        "members": len(found.run.members),
        "views": len(found.run.views),
        "digest_mismatches": int(bool(found.mismatch)),
        "put_right": len(put_right(found.run)),
        "samples_wrong_steps": len(wrong_samples(members, ORDER)),
        "hangs": int(bool(found.hang)),
        "false_ends": int(found.code != 0 and not found.hang),
        "leftovers": len(found.leftovers),
        "longest_standstill_s": standstill_s(commits, commits[0], commits[-1]) if len(commits) > 1 else None,
        **figures(found.samples),
        "what": " / ".join(each for each in (found.hang, found.mismatch, *found.leftovers) if each)[:1000],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.soak.run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="so long faults are struck")
    parser.add_argument("--mtbf", type=float, default=6.0, help="mean seconds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="where the job's folder stays; default: a temporary folder")
    add_record_flag(parser)
    args = parser.parse_args()
    unwind_on_sigterm()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="elastrain-soak-"))
    found = soak(folder, minutes=args.minutes, mtbf_s=args.mtbf, seed=args.seed)
    values = values_of(found)
    if args.record:
        settings = {"minutes": args.minutes, "mtbf_s": args.mtbf, "seed": args.seed, "nodes": NODES}
        record("soak", values, quick=args.minutes < 60, settings=settings)
    met = report(values, REACHES)
    if met:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"the job's folder is {folder}; its last words: {found.last_words[-500:]}", file=sys.stderr)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
