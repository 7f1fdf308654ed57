"""The time by which steps get longer while blocks move: with shadows, and at once. For `run.py --moves`.

Two nodes with networks of their own, a link of 1 Gbit/s between them, and blocks of 32 MiB. A job computes by one plan
until its planner answers with another one, which moves a block over the link. All else is the product's own.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from elastrain.pipeline.pipeline_plan import PipelinePlan
from experiments.jobs import Script, elastic, finish
from experiments.pipeline import train
from experiments.pipeline.figures import Line, step_lengths_s
from experiments.pipeline.steering import Steering
from experiments.pipeline.told import Told, told

WIDTH, WINDOW_S, RUNS, STEPS = 2048, 0.03, 6, 16
"""Blocks of 32 MiB. The planner is asked once every block was measured, after five steps."""
RATE_MBIT = 1000
SETTLED = 3
"""Steps after the handover that count as part of the move: holders follow the blocks meanwhile."""
LEAST_S = 0.3
"""The shortest stall of today's way for which there is a ratio."""
WAIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Move:
    """Two plans over two nodes, which differ in one cut."""

    name: str
    before: PipelinePlan
    after: PipelinePlan
    is_at_once: bool = False
    """True if the plan holds at once, so that all members wait for its publish."""

    @property
    def args(self) -> tuple[str, ...]:
        """Arguments that change bits."""
        return ("--steps", str(STEPS), "--micro-batches", str(RUNS), "--width", str(WIDTH))


@dataclass(frozen=True, kw_only=True)
class Stall:
    """By how much the steps of a move were longer than others by the same plan."""

    seconds: float
    step_s: float
    """The median step by the plan before."""
    steps: int
    """Steps from the record that names the move to the one that ends it."""


def stall(lines: list[Line], *, named: int, ended: int) -> Stall:
    """Return the stall of a move. It is named by the record of step `named`, and the plan holds after step `ended`."""
    lengths = step_lengths_s(lines)
    last = max(lengths)
    # The steps before the first ones are traced, and compile.
    before_s = statistics.median(lengths[step] for step in lengths if 2 <= step <= named)
    after_s = statistics.median(lengths[step] for step in range(ended + SETTLED + 1, last + 1))
    under = {step: before_s if step <= ended else after_s for step in range(named + 1, ended + SETTLED + 1)}
    seconds = sum(lengths[step] - usual_s for step, usual_s in under.items())
    return Stall(seconds=seconds, step_s=before_s, steps=ended - named)


def handover(journals: Mapping[str, list[Line]]) -> tuple[int, int]:
    """Return the steps whose records have named the move, and ended it. Equal if the plan held at once."""
    lines = [line for its in journals.values() for line in its]
    moved = [line for line in lines if line["event"] == "moved" and not line["is_dropped"]]
    if moved:
        return moved[0]["named"], moved[0]["step"]
    step = max(line["step"] for line in lines if line["event"] == "plan")
    return step, step


def run(folder: Path, move: Move, start: Callable[..., Any]) -> tuple[Stall, Told]:
    """Run the job of a move. Returns its stall, and what it has told."""
    its = folder / move.name.replace(" ", "-").replace(",", "")
    its.mkdir(parents=True)
    steering = Steering(first=move.before, then=move.after, is_at_once=move.is_at_once)
    (its / "plan.json").write_bytes(msgspec.json.encode(steering))
    (its / "faults.txt").write_text(f"slow-link --target node:node1 --at t=3 --for 900 --rate {RATE_MBIT}\n")
    options = ["--stages", str(len(move.before.members)), "--max-restarts", "0", "--netns"]
    options += ["--faults", str(its / "faults.txt")]
    args = (*move.args, "--window-ms", str(1000 * WINDOW_S), "--plan", str(its / "plan.json"))
    script, began_s = Script(path=Path(train.__file__), args=args), time.monotonic()
    with elastic(its, script, members=len(move.before.members), nodes=2, options=options, start=start) as process:
        finish(process, its, timeout_s=WAIT_S)
    found = told(its)
    named, ended = handover(found.journals)
    stalls = [stall(list(lines), named=named, ended=ended) for lines in found.journals.values()]
    result = sorted(stalls, key=lambda each: each.seconds)[len(stalls) // 2]
    lengths = [round(each, 3) for _, each in sorted(step_lengths_s(next(iter(found.journals.values()))).items())]
    sys.stderr.write(
        f"{move.name}: named {named}, ended {ended}, {result}, steps {lengths}, {time.monotonic() - began_s:.0f} s\n"
    )
    return result, found


def moves(before: PipelinePlan, after: PipelinePlan, name: str) -> tuple[Move, Move]:
    """Return the two jobs of one move: with shadows, and with the plan in force at once."""
    with_shadows = Move(name=f"{name}, shadows", before=before, after=after)
    return with_shadows, Move(name=f"{name}, at once", before=before, after=after, is_at_once=True)


def measure(folder: Path, pairs: Mapping[str, tuple[Move, Move]], start: Callable[..., Any]) -> dict[str, Any]:
    """Run both jobs of each move, one after the other, and return the figures of the worst one.

    Their bits are compared with each other. A job of one would take longer than all of them.
    """
    found: dict[str, Any] = {"migration_digest_equal": True}
    ratios: list[float] = []
    shares: list[float] = []
    for name, (with_shadows, at_once) in pairs.items():
        shadow, told_with = run(folder, with_shadows, start)
        today, told_at_once = run(folder, at_once, start)
        found["migration_digest_equal"] &= told_with.is_that_of(told_at_once)
        found |= {f"stall_s {name}": round(shadow.seconds, 3), f"stall_at_once_s {name}": round(today.seconds, 3)}
        shares.append(shadow.seconds / shadow.step_s)
        if today.seconds >= LEAST_S:
            ratios.append(shadow.seconds / today.seconds)
    return {
        **found,
        "migration_stall_ratio": max(ratios) if len(ratios) == len(pairs) else None,
        "migration_stall": max(shares),
    }
