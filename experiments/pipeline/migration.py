"""The time by which steps get longer while blocks move: with shadows, and at once. For `run.py --moves`.

Two nodes with networks of their own, a link of 1 Gbit/s between them, and blocks of 32 MiB. The planner of a job
answers with two plans in turns, so that a block moves over the link and back. All else is the product's own. One move
is within the noise of a step, so that the mean of many counts.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from elastrain.pipeline.pipeline_plan import PipelinePlan
from experiments.jobs import Script, elastic, finish
from experiments.pipeline import train
from experiments.pipeline.figures import Line, step_lengths_s
from experiments.pipeline.steering import Steering
from experiments.pipeline.told import Told, told

WIDTH, WINDOW_S, RUNS, STEPS = 2048, 0.03, 6, 60
"""Blocks of 32 MiB. The planner is asked once every block was measured, after five steps."""
PAUSE_S = 30.0
"""From a question to the planner's answer: some steps by one plan, which tell how long a step usually is."""
RATE_MBIT = 1000
SETTLED = 3
"""Steps after the handover that count as part of the move: holders follow the blocks meanwhile."""
BESIDE = 4
"""Steps before a move, and behind it, with which its own are compared."""
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
    backups: int = 1
    """Without backups the taker of a block has nothing of it, so that optimizer states move, too."""

    @property
    def args(self) -> tuple[str, ...]:
        """Arguments that change bits."""
        return (
            "--steps",
            str(STEPS),
            "--micro-batches",
            str(RUNS),
            "--width",
            str(WIDTH),
            "--backups",
            str(self.backups),
        )


Handover = tuple[int, int]
"""The steps whose records have named a move, and ended it. Equal if the plan held at once."""


@dataclass(frozen=True, kw_only=True)
class Stalls:
    """By how much the steps of each move were longer than others by the same plan."""

    seconds: list[float]
    step_s: float
    """The median step by the first plan."""

    @property
    def mean_s(self) -> float:
        """The mean over the moves."""
        return statistics.mean(self.seconds)

    @property
    def error_s(self) -> float:
        """The standard error of the mean."""
        return statistics.stdev(self.seconds) / len(self.seconds) ** 0.5


def stalls(lines: list[Line], moves: list[Handover]) -> Stalls:
    """Return the stalls of moves that come one after the other, from one plan to another one and back.

    A step of a move is compared with those by the same plan beside the move, because machines get slower and faster.
    """
    lengths = step_lengths_s(lines)
    # The steps before the first ones are traced, and compile.
    ends = [1, *(ended + SETTLED for _, ended in moves)]
    begins = [*(named for named, _ in moves), max(lengths)]
    # Between two moves, and before the first and behind the last one.
    quiet = [[lengths[step] for step in range(end + 1, begin + 1)] for end, begin in zip(ends, begins, strict=True)]
    found: list[float] = []
    for (named, ended), before, after in zip(moves, quiet, quiet[1:], strict=False):
        if before and after:
            before_s, after_s = statistics.median(before[-BESIDE:]), statistics.median(after[:BESIDE])
            window = range(named + 1, ended + SETTLED + 1)
            found.append(sum(lengths[step] - (before_s if step <= ended else after_s) for step in window))
    return Stalls(seconds=found, step_s=statistics.median(quiet[0]))


def handovers(journals: Mapping[str, list[Line]]) -> list[Handover]:
    """Return the moves of a job."""
    lines = [line for its in journals.values() for line in its]
    moved = {(line["named"], line["step"]) for line in lines if line["event"] == "moved" and not line["is_dropped"]}
    if moved:
        return sorted(moved)
    # Its first step is the one that waits for the publish.
    first_steps = {line["step"] for line in lines if line["event"] == "plan"}
    return [(step - 1, step - 1) for step in sorted(first_steps) if step > 2]


def run(folder: Path, move: Move, start: Callable[..., Any]) -> tuple[Stalls, Told]:
    """Run the job of a move. Returns its stalls, and what it has told."""
    its = folder / move.name.replace(" ", "-").replace(",", "")
    its.mkdir(parents=True)
    steering = Steering(first=move.before, then=move.after, pause_s=PAUSE_S, is_at_once=move.is_at_once)
    (its / "plan.json").write_bytes(msgspec.json.encode(steering))
    (its / "faults.txt").write_text(f"slow-link --target node:node1 --at t=3 --for 900 --rate {RATE_MBIT}\n")
    options = ["--stages", str(len(move.before.members)), "--max-restarts", "0", "--netns"]
    options += ["--faults", str(its / "faults.txt")]
    args = (*move.args, "--window-ms", str(1000 * WINDOW_S), "--plan", str(its / "plan.json"))
    script, began_s = Script(path=Path(train.__file__), args=args), time.monotonic()
    with elastic(its, script, members=len(move.before.members), nodes=2, options=options, start=start) as process:
        finish(process, its, timeout_s=WAIT_S)
    found = told(its)
    moved = handovers(found.journals)
    of_members = [stalls(list(lines), moved) for lines in found.journals.values()]
    result = sorted(of_members, key=lambda each: each.mean_s)[len(of_members) // 2]
    lengths = [round(each, 3) for _, each in sorted(step_lengths_s(next(iter(found.journals.values()))).items())]
    sys.stderr.write(
        f"{move.name}: {moved}, {[round(each, 3) for each in result.seconds]}, mean {result.mean_s:.3f} ± "
        f"{result.error_s:.3f}, usual {result.step_s:.3f}, steps {lengths}, {time.monotonic() - began_s:.0f} s\n"
    )
    return result, found


def moves(before: PipelinePlan, after: PipelinePlan, name: str, backups: int = 1) -> tuple[Move, Move]:
    """Return the two jobs of one move: with shadows, and with the plan in force at once."""
    with_shadows = Move(name=f"{name}, shadows", before=before, after=after, backups=backups)
    return with_shadows, replace(with_shadows, name=f"{name}, at once", is_at_once=True)


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
        for key, each in (("stall_s", shadow), ("stall_at_once_s", today)):
            found |= {f"{key} {name}": round(each.mean_s, 3), f"{key} {name}, error": round(each.error_s, 3)}
        found[f"moves {name}"] = [len(shadow.seconds), len(today.seconds)]
        shares.append(shadow.mean_s / shadow.step_s)
        if today.mean_s >= LEAST_S:
            ratios.append(shadow.mean_s / today.mean_s)
    return {
        **found,
        "migration_stall_ratio": max(ratios) if len(ratios) == len(pairs) else None,
        "migration_stall": max(shares),
    }
