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
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.faults import train
from experiments.faults.driver import Driver, StrikeError
from experiments.faults.figures import commits_s, standstill_s, without_flipped
from experiments.faults.trials import ORDER
from experiments.harness import Reach, add_record_flag, record, report
from experiments.jobs import Script, alone, elastic, finish, unwind_on_sigterm
from experiments.journals import Run
from experiments.recovery.figures import wrong_samples
from experiments.soak.drawing import Drawn, faults
from experiments.soak.figures import Sample, figures
from experiments.soak.looking import look
from experiments.storm.oracle import difference, read_steps, unfinished
from experiments.storm.processes import MARK, Processes, leftovers

NODES = 3
STEPS = 1_000_000
"""More than any soak has; a file says which step is the last."""
AHEAD = 30
"""So many steps ahead of the present one is the last, when time is over."""
LOOK_EVERY_S, ASK_EVERY_S, SAMPLE_EVERY_S = 0.1, 0.5, 10.0
STILL_S, START_S = 120.0, 180.0
REACHES = {
    name: Reach(limit=0)
    for name in ("digest_mismatches", "samples_wrong_steps", "hangs", "false_ends", "leftovers", "grown")
}
REACHES["faults"] = Reach(limit=300, at_least=True)


@dataclass(kw_only=True)
class Soak:
    """What was seen."""

    run: Run
    chaos: Chaos
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
        chaos = Chaos(driver=driver, drawn=faults(seed, mtbf_s), until_s=time.monotonic() + minutes * 60)
        found = Soak(run=driver.run, chaos=chaos)
        try:
            _follow(found, driver, processes, chaos)
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


@dataclass(kw_only=True)
class Chaos:
    """Strikes what is drawn, one after the other, where a copy of every shard is left; says what it has struck."""

    driver: Driver
    drawn: Iterator[Drawn]
    until_s: float
    struck: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    flipped_s: dict[str, float | None] = field(default_factory=dict)
    """Member -> when one of its bits was to flip."""
    _next: Drawn | None = None
    _due_s: float = 0.0
    _asked_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.until_s

    def look(self) -> None:
        """Strike what is due, if every shard survives a loss more; else it waits."""
        now_s = time.monotonic()
        if self._next is None:
            self._next = next(self.drawn)
            self._due_s = now_s + self._next.wait_s
        if now_s < max(self._due_s, self._asked_s + ASK_EVERY_S):
            return
        self._asked_s = now_s
        if not self.driver.survives(1):
            return
        drawn, self._next = self._next, None
        rank = int(drawn.pick * len(self.driver.members))
        try:
            self.struck.append(self.driver.inject(drawn.way, rank, drawn.phase))
            if drawn.way.kind == "flip":
                self.flipped_s[self.driver.members[rank]] = now_s
        except StrikeError as error:
            self.refused.append(str(error))


def _follow(found: Soak, driver: Driver, processes: Processes, chaos: Chaos) -> None:
    """To the job's end, or until it stands still."""
    begun_s = sampled_s = time.monotonic()
    enough = False
    while driver.alive:
        now_s, commits = time.monotonic(), commits_s(driver.follower.look())
        if not enough and chaos.is_over:
            _say_enough(driver)
            enough = True
        if commits and not enough:
            chaos.look()
        if now_s - sampled_s > SAMPLE_EVERY_S and commits:
            found.samples.append(_sample(driver, processes, now_s - begun_s))
            sampled_s = now_s
        still_s = now_s - (commits[-1] if commits else begun_s)
        if still_s > (STILL_S if commits else START_S):
            found.hang = f"no commit for {still_s:.0f} s after {len(commits)} commits"
            return
        time.sleep(LOOK_EVERY_S)


def _say_enough(driver: Driver) -> None:
    """The last step, well ahead, so that every member reads of it in time; from now on steps take their own time."""
    draft = driver.folder / "enough.new"
    draft.write_text(str(driver.step + AHEAD))
    draft.replace(driver.folder / "enough")
    driver.release()


def _sample(driver: Driver, processes: Processes, at_s: float) -> Sample:
    workers = {pid for name, pid in driver.run.pids.items() if name not in driver.run.deaths_s}
    return look(at_s, processes.all(), workers, (driver.folder, driver.folder.parent / "tmp"))


def _compare(found: Soak, folder: Path, script: Script) -> str:
    """Every line of every member against the job of one, up to the same step."""
    enough = folder / "run" / "enough"
    members = without_flipped(read_steps(folder / "run"), found.run, found.chaos.flipped_s)
    (folder / "alone").mkdir(exist_ok=True)
    last = max((int(lines[-1].split()[0]) for lines in members.values() if lines), default=-1)
    (folder / "alone" / "enough").write_text(str(last + 1))
    with alone(folder / "alone", script) as process:
        finish(process, folder / "alone", timeout_s=7200)
    reference = read_steps(folder / "alone")["alone"]
    return difference(members, reference) or (unfinished(members, reference) if enough.exists() else "")


def values_of(found: Soak) -> dict[str, Any]:
    """The keys of the README."""
    commits = commits_s(found.run)
    members = found.run.members.values()
    kinds = Counter(line.split()[0] for line in found.chaos.struck)
    return {
        "faults": sum(kinds.values()),
        "refused": len(found.chaos.refused),
        "faults_by_class": dict(sorted(kinds.items())),
        "commits": len(commits),
        "members": len(found.run.members),
        "views": len(found.run.views),
        "digest_mismatches": int(bool(found.mismatch)),
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
    parser.add_argument("--mtbf", type=float, default=8.0, help="mean seconds between two faults")
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
