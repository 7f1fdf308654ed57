"""The price of this checkout beside an earlier one: two CPU jobs of one take turns, a few steps at a time.

Both processes live from the beginning to the end, and one of them is stopped at any time. So what another program takes
of the machine for a minute falls on both. Beside the time of a step there is its processor time, which a busy machine
disturbs less.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.accelerator.models import FIRST
from experiments.harness import ROOT, ratio
from experiments.jobs import Script, alone, finish
from experiments.journals import read_member

PRICE = ("--size", "tiny", "--global-batch-size", "32")
TURN_STEPS = 3
"""Whole steps of a turn. It begins with the rest of a step, which does not count."""
DEADLINE_S = 900.0
_LOOK_S = 0.005


@dataclass
class Turn:
    """One turn of one job: its whole steps, and the processor seconds of each."""

    steps: range
    processor_s: float


@dataclass
class Stopped:
    """A job that trains only in its turns."""

    process: subprocess.Popen[bytes]
    folder: Path
    turns: list[Turn] = field(default_factory=list)

    def begin(self) -> None:
        """Wait for the first steps, and stop the job."""
        self._until(FIRST)
        self.process.send_signal(signal.SIGSTOP)

    def take_turn(self) -> None:
        """Train the rest of a step and `TURN_STEPS` more."""
        self.process.send_signal(signal.SIGCONT)
        first = self.steps_seen() + 1
        self._until(first)
        begun_s = processor_s(self.process.pid)
        self._until(first + TURN_STEPS)
        took_s = processor_s(self.process.pid) - begun_s
        self.process.send_signal(signal.SIGSTOP)
        self.turns.append(Turn(range(first, first + TURN_STEPS), took_s / TURN_STEPS))

    def step_s(self) -> list[float]:
        """Return, for each turn, the median time of its whole steps."""
        passed_s = [each.at_s for each in read_member(self.folder).passed]
        took_s = [later - earlier for earlier, later in pairwise(passed_s)]
        return [statistics.median(took_s[step - 1] for step in turn.steps) for turn in self.turns]

    def end(self) -> None:
        """Train to the end, so that a job that fails is not taken for one that is fast."""
        self.process.send_signal(signal.SIGCONT)
        finish(self.process, self.folder, timeout_s=DEADLINE_S)

    def steps_seen(self) -> int:
        """Return the number of steps that the job has printed."""
        return (b"\n" + (self.folder / "output.log").read_bytes()).count(b"\nstep ")

    def _until(self, steps: int) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while self.steps_seen() < steps:
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"step {steps} was not reached: {(self.folder / 'output.log').read_text()[-1500:]}")
            time.sleep(_LOOK_S)


def processor_s(pid: int) -> float:
    """Return the processor time of all threads of a process, which the kernel counts in nanoseconds."""
    found = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            found += int(path.read_text().split()[0])
        except (OSError, IndexError):  # the thread has ended
            continue
    return found / 1e9


def cpu_price(before: Path, folder: Path, rounds: int) -> Mapping[str, Any]:
    """Return the time of a step in this checkout over that in another one, and the same of processor time."""
    steps = FIRST + 1 + (rounds + 1) * (TURN_STEPS + 1)
    trees = {"after": ROOT, "before": before.resolve()}
    with ExitStack() as stack:
        jobs = {
            name: stack.enter_context(_started(tree, folder / f"price-{name}", steps)) for name, tree in trees.items()
        }
        for each in jobs.values():
            each.begin()
        for number in range(rounds):
            for name in list(jobs)[:: -1 if number % 2 else 1]:
                jobs[name].take_turn()
        for each in jobs.values():
            each.end()
    return compared(*jobs.values())


def compared(after: Stopped, before: Stopped) -> dict[str, Any]:
    """Return the figures of two jobs that have had as many turns as each other."""
    processor = [[turn.processor_s for turn in job.turns] for job in (after, before)]
    wall = [job.step_s() for job in (after, before)]
    return {
        "cpu_price": ratio(*wall),
        "cpu_price_processor": ratio(*processor),
        "cpu_step_s": statistics.median(wall[0]),
        "cpu_step_processor_s": statistics.median(processor[0]),
        "cpu_price_spread": _spread(*processor),
    }


def _spread(after: Sequence[float], before: Sequence[float]) -> list[float]:
    """Return the quartiles of the ratios of processor time."""
    ratios = [one / other for one, other in zip(after, before, strict=True)]
    return [round(each, 4) for each in statistics.quantiles(ratios, n=4)] if len(ratios) > 1 else ratios


@contextmanager
def _started(tree: Path, folder: Path, steps: int) -> Iterator[Stopped]:
    script = Script(path=tree / "experiments" / "train_gpt" / "train.py", args=(*PRICE, "--steps", str(steps)))

    def start(command: list[str], env: dict[str, str], **rest: Any) -> Any:
        return subprocess.Popen(command, env={**env, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}, **rest)

    with alone(folder, script, start=start) as process:
        try:
            yield Stopped(process, folder)
        finally:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)  # a stopped process does not take the signal that ends it
