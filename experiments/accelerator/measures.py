"""The rows of the table that are counts, bytes, peaks and seconds."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from elastrain.snapshot.digest import ROW
from experiments.accelerator import models
from experiments.accelerator.jobs import DEADLINE_S, Job, Ran, run_job
from experiments.accelerator.models import FIRST, Training
from experiments.harness import ROOT, interleave

METERED = Training(meters=True, steps=8)
STRUCK_IN = 4
BACKWARD_S = 0.01
"""Seconds that the backward of each layer takes, so that copies go on beside it."""
HANG_MORE_STEPS = 8
DIGESTS_BYTES = 2 * 8 * ROW
"""Memory of digests on the device: the weights of a row, and the products of one. Shards here have one whole row."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The place of a measurement, and its settings."""

    folder: Path
    device: str = "late"
    rounds: int = 1
    start: Callable[..., Any]
    ran: list[tuple[str, Ran]] = field(default_factory=list)
    """Jobs so far, whose races and leftovers count for the table."""
    deadline_s: float = DEADLINE_S
    """Time that each job has."""
    until_s: float = float("inf")
    """Monotonic time at which a job that still runs is killed."""

    def run(self, name: str, training: Training, stages: int = 1, **how: Any) -> Ran:
        """Run a job that has to end well. Raises RuntimeError with its last words otherwise. `how`: fields of `Job`."""
        job = Job(training=replace(training, device=self.device), stages=stages, **how)
        limits = {"deadline_s": self.deadline_s, "until_s": self.until_s}
        ran = run_job(job, self.folder / f"{len(self.ran)}-{name}", start=self.start, **limits)
        self.ran.append((name, ran))
        if ran.code != 0 and not training.troubles:
            raise RuntimeError(f"{name}: exit code {ran.code}: {ran.output[-1500:]}")
        return ran


Figures = Mapping[str, Any]


def waits(bench: Bench) -> Figures:
    """Count the waits of the loop's thread for the device, in a job of three."""
    ran = bench.run("waits", replace(METERED, members=3))
    steps = _steps(ran)
    return {
        "waits_per_micro_batch": max(line["waits_batch"] / max(line["micro_batches"], 1) for line in steps),
        "waits_per_step": max(line["waits_around"] for line in steps),
        "waits_where": _where(steps),
    }


def boundary_waits(bench: Bench) -> Figures:
    """Count the same per tensor that a pipeline of three stages hands on, forward and back."""
    ran = bench.run("boundary_waits", replace(METERED, members=3), stages=3)
    steps, count = _steps(ran), METERED.steps - FIRST
    boundaries = count * METERED.micro_batches * 2 * (3 - 1)
    return {
        "boundary_waits": sum(line["waits_batch"] for line in steps) / boundaries,
        "boundary_waits_where": _where(steps),
    }


def carried(bench: Bench) -> Figures:
    """Count the bytes that are copied out and in, and compare them with those that have to be."""
    one = bench.run("bytes_alone", replace(METERED, model="wide"))
    four = bench.run("bytes_of_four", replace(METERED, model="wide", members=4, backups=0, pause_s=BACKWARD_S))
    found = {name: _total(four, name) for name in ("bytes_out", "bytes_in", "wanted_out", "wanted_in")}
    gradients = _total(four, "gradient_bytes")
    return {
        "bytes_alone": _total(one, "bytes_out") + _total(one, "bytes_in"),
        "bytes_out": found["bytes_out"] / (found["wanted_out"] or float("nan")),
        "bytes_in": found["bytes_in"] / (found["wanted_in"] or float("nan")),
        "tail_bytes": _total(four, "tail_bytes") / gradients if gradients else float("nan"),
        "carried_mb": found["bytes_out"] / 1e6,
    }


def device_bytes(bench: Bench) -> Figures:
    """Compare the peaks on the device with the account, and with the plain loop's."""
    wide = replace(METERED, model="wide", micro_batches=3)
    members, runs = (bench.run(f"peak of {count}", replace(wide, members=count, backups=0)) for count in (3, 1))
    # A job of one has its whole share in one run, as docs/devices.md advises for large models; `runs` has one each.
    one = bench.run("peak of one run", replace(wide, model="wide_in_one_run", backups=0))
    plain = bench.run("peak of the plain loop", replace(wide, plain=True))
    numbers = sum(p.numel() for p in models.build(replace(wide, device="cpu")).parameters())
    parameters = gradients = 4 * numbers
    last = [lines[-1] for lines in members.facts.values()]
    account = parameters + gradients + DIGESTS_BYTES
    shares = [each["peak_bytes"] / (account + each["states_bytes"] + each["buffer_bytes"]) for each in last]
    alone_bytes, runs_bytes, plain_bytes = (ran.facts["alone"][-1]["peak_bytes"] for ran in (one, runs, plain))
    return {
        "device_bytes": max(shares),
        "device_bytes_alone": alone_bytes / plain_bytes,
        "alone_in_three_runs": runs_bytes / plain_bytes,
        "peaks_mb": [
            round(each / 1e6, 2)
            for each in (*(f[-1]["peak_bytes"] for f in members.facts.values()), alone_bytes, plain_bytes)
        ],
    }


def hang_found(bench: Bench) -> Figures:
    """Measure how much longer a stream that never ends stays unfound than a loop that hangs."""

    def found_s(what: str) -> float:
        troubles = (("m1", STRUCK_IN, what),)
        ran = bench.run(what, Training(members=3, steps=STRUCK_IN + HANG_MORE_STEPS, troubles=troubles, pause_s=0.05))
        struck = ran.folder / "struck"
        at_s = ran.run.deaths_s.get("m1")
        return at_s - float(struck.read_text()) if at_s is not None and struck.exists() else float("nan")

    cases = {what: partial(found_s, what) for what in ("stream hangs", "loop hangs")}
    seconds = interleave(cases, rounds=bench.rounds)
    stream_s, loop_s = (statistics.median(seconds[what]) for what in cases)
    return {"hang_found_s": stream_s - loop_s, "hang_stream_s": stream_s, "hang_loop_s": loop_s}


PARTS: dict[str, tuple[Callable[[Bench], Figures], tuple[str, ...]]] = {
    "waits": (waits, ("waits_per_micro_batch", "waits_per_step")),
    "boundary_waits": (boundary_waits, ("boundary_waits",)),
    "carried": (carried, ("bytes_alone", "bytes_out", "bytes_in", "tail_bytes")),
    "device_bytes": (device_bytes, ("device_bytes", "device_bytes_alone")),
    "hang_found": (hang_found, ("hang_found_s",)),
}
"""Functions that measure, and their keys in the table."""
ALONE = ("hang_found",)
"""Parts beside which no other job runs."""


def floor(python: str, arguments: list[str]) -> Figures:
    """Run this experiment with another interpreter, which has the oldest torch that is supported."""
    command = [python, "-m", "experiments.accelerator.run", *arguments]
    ran = subprocess.run(
        command, check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    sys.stderr.write(ran.stdout + ran.stderr)
    missed = re.findall(r"^(\w+) .*MISSED$", ran.stdout, re.M)
    return {"floor": float(ran.returncode in (0, 1) and not missed), "floor_missed": missed}


def _steps(ran: Ran) -> list[dict[str, Any]]:
    """Return the facts of all members in undisturbed steps."""
    last = ran.job.training.steps - 1
    return [line for lines in ran.facts.values() for line in lines if FIRST <= line["step"] <= last]


def _total(ran: Ran, name: str) -> int:
    return sum(lines[-1].get(name, 0) for lines in ran.facts.values())


def _where(steps: list[dict[str, Any]]) -> dict[str, int]:
    """Return the places of waits, with the number over all steps."""
    found: dict[str, int] = {}
    for line in steps:
        for place, count in line["where"].items():
            found[place] = found.get(place, 0) + count
    return found
