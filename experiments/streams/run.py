"""Do streams survive? Random schedules of losses, joins and resumes, compared with a job of one that nothing disturbs.

python -m experiments.streams.run [--quick] [--only SOURCE …] [--record]
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from experiments.harness import Reach, add_record_flag, record, report
from experiments.jobs import Script, Start, alone, elastic, finish, unwind_on_sigterm
from experiments.streams.sources import SOURCES, missing

SCHEDULES, STEPS, TIMEOUT_S = 30, 12, 240.0
TRAIN = Path(__file__).with_name("train.py")
SHAPES = ((4, 4), (2, 4), (4, 6))
"""(streams, micro-batches per step)."""
PHASES = ("forward", "backward", "reduce", "commit", "apply", "publish")
REACHES = {
    "digest_equal": Reach(limit=1, at_least=True),
    "samples_lost": Reach(limit=0),
    "samples_twice": Reach(limit=0),
}


@dataclass(frozen=True, kw_only=True)
class Life:
    """One start of a job: its members, the step at which it ends, and the faults in it."""

    members: int
    until: int
    faults: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A job on one kind of data, in one to three lives, each of which but the first goes on from a checkpoint."""

    number: int
    source: str
    streams: int
    micro_batches: int
    lives: tuple[Life, ...]


def draw(number: int, sources: tuple[str, ...]) -> Schedule:
    """Draw a schedule. Its number decides all of it."""
    rng = random.Random(number)
    ends = [*sorted(rng.sample(range(3, STEPS - 1), rng.choice([0, 1, 2]))), STEPS]
    lives, first = [], 0
    for end in ends:
        members = rng.randint(1, 4)
        kills = rng.randint(0, min(2, members - 1))
        steps = rng.sample(range(first + 1, end), min(kills, end - first - 1))
        faults = tuple(f"kill --target member:random --at step={s},phase={rng.choice(PHASES)}" for s in sorted(steps))
        lives.append(Life(members=members, until=end, faults=faults))
        first = end
    streams, micro_batches = SHAPES[number // len(sources) % len(SHAPES)]
    source = sources[number % len(sources)]
    return Schedule(number=number, source=source, streams=streams, micro_batches=micro_batches, lives=tuple(lives))


@dataclass(frozen=True, kw_only=True)
class Read:
    """Samples that a job has read, by (step, micro-batch), and the digest at its end."""

    digests: frozenset[str]
    samples: dict[tuple[int, int], set[str]]

    @staticmethod
    def of(output: str, folder: Path) -> Read:
        found: dict[tuple[int, int], set[str]] = {}
        for file in folder.iterdir():
            for step, micro_batch, samples in re.findall(r"^(\d+) (\d+) ([\d,]+);$", file.read_text(), re.MULTILINE):
                found.setdefault((int(step), int(micro_batch)), set()).add(samples)
        return Read(digests=frozenset(re.findall(r"digest (\w+)", output)), samples=found)

    def counts(self) -> Counter[str]:
        """Count the uses of each sample. Micro-batches that two members have read count once for each content."""
        return Counter(sample for all_ in self.samples.values() for each in all_ for sample in each.split(","))


class Bench:
    """A folder for jobs and sources."""

    def __init__(self, folder: Path, start: Start) -> None:
        self._folder, self._start = folder, start
        self.undisturbed = cache(self._undisturbed)

    def _script(self, source: str, shape: tuple[int, int], read: Path, until: int) -> Script:
        streams, micro_batches = shape
        values = {"source": source, "folder": self._folder / "sources", "read": read, "steps": until}
        values |= {"streams": streams, "micro-batches": micro_batches}
        return Script(path=TRAIN, args=tuple(str(each) for name, v in values.items() for each in (f"--{name}", v)))

    def _undisturbed(self, source: str, shape: tuple[int, int]) -> Read:
        folder = self._folder / f"{source}-{shape[0]}-{shape[1]}"
        with alone(folder, self._script(source, shape, folder / "read", STEPS), start=self._start) as process:
            return Read.of(finish(process, folder, timeout_s=TIMEOUT_S), folder / "read")

    def play(self, schedule: Schedule) -> Read:
        """Run a schedule to its end."""
        shape, folder = (schedule.streams, schedule.micro_batches), self._folder / f"schedule-{schedule.number}"
        output = ""
        for index, life in enumerate(schedule.lives):
            place = folder / f"life-{index}"
            place.mkdir(parents=True)
            (place / "faults").write_text("\n".join(life.faults))
            options = ["--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", "3", "--resume", "auto"]
            options += ["--faults", str(place / "faults")] if life.faults else []
            script = self._script(schedule.source, shape, folder / "read", life.until)
            with elastic(place, script, members=life.members, options=options, start=self._start) as process:
                output = finish(process, place, timeout_s=TIMEOUT_S)
        return Read.of(output, folder / "read")


def judged(bench: Bench, schedule: Schedule) -> dict[str, Any]:
    """Return the figures of one schedule."""
    expected = bench.undisturbed(schedule.source, (schedule.streams, schedule.micro_batches))
    try:
        found = bench.play(schedule)
    except RuntimeError as error:
        sys.stderr.write(f"{schedule}\n{error}\n")
        return {"schedule": schedule.number, "source": schedule.source, "digest_equal": False, "lost": 0, "twice": 0}
    lost, twice = expected.counts() - found.counts(), found.counts() - expected.counts()
    equal = found.digests == expected.digests and found.samples == expected.samples
    if not equal:
        sys.stderr.write(f"{schedule}\n{expected.digests} {found.digests} lost {lost} twice {twice}\n")
    return {
        "schedule": schedule.number,
        "source": schedule.source,
        "digest_equal": equal,
        "lost": lost.total(),
        "twice": twice.total(),
    }


def figures(options: argparse.Namespace) -> dict[str, Any]:
    """Play all schedules, two at a time."""
    skipped = {name: why for name in options.only if (why := missing(name))}
    sources = tuple(name for name in options.only if name not in skipped)
    folder = Path(tempfile.mkdtemp(prefix="streams-"))
    bench = Bench(folder, subprocess.Popen)
    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            count = SCHEDULES if options.quick else 4 * SCHEDULES
            rows = list(pool.map(lambda number: judged(bench, draw(number, sources)), range(count)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "schedules": len(rows),
        "sources": list(sources),
        "skipped": skipped,
        "digest_equal": all(row["digest_equal"] for row in rows),
        "samples_lost": sum(row["lost"] for row in rows),
        "samples_twice": sum(row["twice"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.streams.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{SCHEDULES} schedules instead of {4 * SCHEDULES}")
    parser.add_argument("--only", nargs="+", default=SOURCES, choices=SOURCES)
    parser.add_argument("--jobs", type=int, default=2, help="schedules at once")
    add_record_flag(parser)
    options = parser.parse_args()
    unwind_on_sigterm()
    found = figures(options)
    if options.record:
        record("streams", found, quick=options.quick, settings={"steps": STEPS, "shapes": SHAPES})
    sys.exit(0 if report(found, REACHES) else 1)


if __name__ == "__main__":
    main()
