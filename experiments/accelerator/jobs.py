"""Runs one job of the training script on real processes, and says everything that is wrong with it."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from experiments.accelerator.commands import followed, marked
from experiments.accelerator.models import Training
from experiments.jobs import Script, alone, elastic
from experiments.journals import Member, Run, read_member, read_run
from experiments.recovery.figures import samples_amiss, steps_lost
from experiments.storm.oracle import difference, read_steps, unfinished
from experiments.storm.processes import Processes, leftovers
from tests.support import warm

TRAIN = Path(__file__).with_name("train.py")
DEADLINE_S = 90.0
SETTLE_S = 5.0
ALONE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment that the launcher sets for its workers, for a job of one without a launcher."""
JUDGED = ("late", "cpu")
"""Devices of jobs whose shared memory is looked for afterwards."""
DESCRIPTORS_MORE = 4
"""So many more descriptors than in an earlier step of the whole job are no leftovers: loaders and links come and go."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job: its training, how it is started, and what strikes it from outside."""

    training: Training
    stages: int = 1
    nodes: int | None = None
    faults: Sequence[str] = ()
    """Lines of a faults file."""
    options: Sequence[str] = ()
    then: Sequence[Training] = ()
    """Trainings that the same processes run afterwards."""
    losses: int = 0
    """Number of members that have to be lost; otherwise nothing was tried."""

    @property
    def is_alone(self) -> bool:
        return self.training.members == 1 and not self.options and not self.faults


@dataclass(kw_only=True)
class Ran:
    """The files and figures that a job has left."""

    folder: Path
    job: Job
    code: int | None
    """None if it was still running at its deadline, or was killed by the experiment."""
    left: Sequence[str] = ()
    before: Ran | None = None
    """The job that wrote the checkpoint from which this one was resumed."""
    steps: dict[str, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = read_steps(self.folder)

    @cached_property
    def output(self) -> str:
        return (self.folder / "output.log").read_text(errors="replace")

    @cached_property
    def run(self) -> Run:
        if self.job.is_alone:
            return Run(members={"alone": read_member(self.folder)})
        return read_run(self.folder)

    @cached_property
    def facts(self) -> dict[str, list[dict[str, Any]]]:
        """Member -> its lines."""
        found = {}
        for path in sorted((self.folder / "facts").glob("*.jsonl")):
            text = path.read_text()
            found[path.stem] = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return found

    @property
    def races(self) -> list[str]:
        """Return races that were listed, and those that only the traceback of a member shows."""
        listed = {race for lines in self.facts.values() for line in lines for race in line["races"]}
        return sorted(listed | set(re.findall(r"RaceError: (.*)", self.output)))

    @property
    def touches(self) -> int:
        """Return the number of members that touched an address of the device."""
        return len(re.findall(r"ended .*(?:SIGSEGV|signal 11)", self.output))

    def has_planted(self) -> bool:
        return (self.folder / "planted").exists()

    def until(self, steps: int) -> list[str]:
        """Return the lines of a job of one as they are if it ends after so many steps."""
        lines = self.steps["alone"][:steps]
        return [*lines, f"{steps} {lines[-1].split()[1]}"] if len(lines) == steps else self.steps["alone"]

    def amiss(self, reference: Ran) -> dict[str, Any]:
        """Return the faults by the key of the table that they count for; figures of 0 are left out."""
        training, lives = self.job.training, [each for each in (self.before, self) if each is not None]
        members: list[Member] = [member for life in lives for member in life.run.members.values()]
        lost, repeated = samples_amiss(members, training.order, training.steps)
        found = {
            "digest": next(filter(None, self._wrong(lives, reference.until(training.steps))), ""),
            "steps_lost": steps_lost(members),
            "samples_lost": lost,
            "samples_repeated": repeated,
            "leftovers": [*self.left, *self._descriptors()],
            "races": self.races,
            "host_touches": self.touches,
            "times": self._times(),
        }
        return {key: value for key, value in found.items() if value}

    def _wrong(self, lives: Sequence[Ran], alone: Sequence[str]) -> Iterator[str]:
        """Yield what is wrong with the end of the job, and with the steps of all its lives."""
        yield self.end()
        yield from (difference(life._comparable(), alone) for life in lives)
        yield unfinished(self.steps, alone)
        if len(self.run.deaths_s) < self.job.losses:
            yield f"{len(self.run.deaths_s)} members were lost for {self.job.losses}: nothing was tried"

    def end(self) -> str:
        """Return how a job ended that did not end well, and its last words."""
        if self.code == 0:
            return ""
        told = [line for line in self.output.splitlines() if re.match(r"elastrain:|\w*Error", line)] or [self.output]
        return f"{'stuck' if self.code is None else f'exit code {self.code}'}: {' / '.join(told[-3:])[-700:]}"

    def _comparable(self) -> dict[str, list[str]]:
        """Return the lines with the CPU's digests where a member of a pipeline has none of its own."""
        return {name: [line for line in lines if " - " not in line] for name, lines in self.steps.items()}

    def _times(self) -> str:
        """Return how the times of micro-batches that the product goes by differ from the device's; empty if alike."""
        lasts = [lines[-1] for lines in self.facts.values() if lines and lines[-1].get("told_s")]
        wrong = [f"{line['told_s']:.2f} s for {line['device_s']:.2f} s" for line in lasts if not _is_alike(line)]
        return "; ".join(wrong) if self.job.training.slowness > 1 else ""

    def _descriptors(self) -> list[str]:
        found = []
        for member, lines in self.facts.items():
            counts = [line["descriptors"] for line in lines]
            if len(counts) == self.job.training.steps + 1 and counts[-2] > counts[2] + DESCRIPTORS_MORE:
                found.append(f"{counts[-2] - counts[2]} descriptors of {member}")
        return found


def run_job(
    job: Job,
    folder: Path,
    *,
    deadline_s: float = DEADLINE_S,
    until_s: float = float("inf"),
    start: Callable[..., Any] = warm.Popen,
    kill_when: Callable[[], bool] = lambda: False,
) -> Ran:
    """Run a job in a folder of its own, until its end, or until `kill_when`: then all its processes are killed.

    So they are after `deadline_s`, and at the monotonic time `until_s`.
    """
    run, temporary = folder / "run", folder / "tmp"
    temporary.mkdir(parents=True)
    run.mkdir()
    script = Script(path=TRAIN, args=tuple(each.to_json() for each in (job.training, *job.then)))
    options = [*job.options, *(("--stages", str(job.stages)) if job.stages > 1 else ())]
    if job.faults:
        (folder / "faults.txt").write_text("".join(f"{fault}\n" for fault in job.faults))
        options += ["--faults", str(folder / "faults.txt")]
    with marked() as (processes, variables):
        environment = {**variables, "PYTHONHASHSEED": "0", "ACCELERATOR_STAGES": str(job.stages)}
        started = (
            alone(run, script, start=_with(start, environment | (ALONE if job.training.deterministic else {})))
            if job.is_alone
            else elastic(
                run,
                script,
                members=job.training.members,
                start=start,
                temporary=temporary,
                environment=environment,
                options=options,
                nodes=job.nodes,
            )
        )

        def look() -> bool:
            if job.training.device in JUDGED:  # looking at the memory of processes costs them time
                processes.note_segments()
            return kill_when()

        with started as process:
            dump = partial(_dump_stacks, processes, run)
            left_s = min(deadline_s, until_s - time.monotonic())
            code = followed(process, processes, left_s, look=look, at_deadline=dump)
        left = () if code is None else leftovers(processes, run, temporary, _name_of(run), settle_s=SETTLE_S)
    return Ran(folder=run, job=job, code=code, left=left)


def _dump_stacks(processes: Processes, run: Path) -> None:
    workers = read_run(run).pids.values() if (run / "events.jsonl").exists() else processes.all()
    processes.dump_stacks([pid for pid in workers if processes.owns(pid)])


def _with(start: Callable[..., Any], environment: dict[str, str]) -> Callable[..., Any]:
    """`alone` takes no environment."""
    return lambda command, env, **rest: start(command, env={**env, **environment}, **rest)


def _is_alike(line: dict[str, Any]) -> bool:
    return bool(0.5 * line["device_s"] < line["told_s"] < 2 * line["device_s"])


def _name_of(run: Path) -> str:
    if not (run / "events.jsonl").exists():
        return ""
    with (run / "events.jsonl").open() as lines:
        return str(json.loads(lines.readline()).get("job", ""))


def total(found: Sequence[dict[str, Any]]) -> Counter[str]:
    """Add up what jobs have amiss: numbers, and lengths of lists."""
    counts: Counter[str] = Counter()
    for each in found:
        for key, value in each.items():
            counts[key] += value if isinstance(value, int) else 1 if isinstance(value, str) else len(value)
    return counts
