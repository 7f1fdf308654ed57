"""Command `elastrain chaos`: inject random faults into a running job.

The faults follow from a seed. The command prints them as a schedule that replays them.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer

from elastrain.errors import ConfigError
from elastrain.launcher.cli.commands.inject import ask
from elastrain.launcher.cli.options.grouped import grouped
from elastrain.launcher.faults.fault import Fault
from elastrain.launcher.faults.random_faults import DEFAULT, ChaosPlan, Draw, Situation, aim, draws, possible
from elastrain.launcher.faults.table import NOT_ARMED
from elastrain.launcher.faults.victims import MaybeLost
from elastrain.launcher.shared import operator_messages, rundir
from elastrain.launcher.shared.console import RunArgument, RunOption, one_of, say
from elastrain.launcher.shared.operator_messages import Answer
from elastrain.launcher.shared.rundir import RunDir

_LOOK_EVERY_S = 0.5
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class ChaosFlags:
    """Options for the choice of faults, and for how long they are drawn."""

    seed: Annotated[int, typer.Option("--seed", help="Of all that is drawn.")]
    mtbf: Annotated[float, typer.Option("--mtbf", min=0.01, max=1e9, help="Mean seconds between two faults.")] = 10.0
    duration: Annotated[str, typer.Option("--for", metavar="TIME", help="How long faults are drawn: 90, 10m, 1h.")] = (
        "1h"
    )
    classes: Annotated[
        str, typer.Option("--classes", help="Classes to draw from, with commas; named twice, drawn twice as often.")
    ] = ",".join(DEFAULT)
    reckless: Annotated[
        bool, typer.Option("--reckless", help="Also strike the last holders of state, and in phases of a recovery.")
    ] = False

    def plan(self) -> ChaosPlan:
        """Return what to draw from. Raises ConfigError."""
        classes = tuple(filter(None, self.classes.split(",")))
        return ChaosPlan(seed=self.seed, mean_s=self.mtbf, classes=classes, reckless=self.reckless)

    def for_s(self) -> float:
        """Return --for in seconds. Raises ConfigError."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", self.duration)
        if found is None:
            raise ConfigError(f"--for {self.duration!r}: write a number of seconds, or of m or h, such as 10m or 1h")
        return float(found[1]) * _UNITS[found[2]]


@grouped
def chaos(
    flags: ChaosFlags,
    run: RunArgument = None,
    named: RunOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object per line: each fault, then a summary.")
    ] = False,
) -> int:
    """Draw faults at random for a job that was started with --inject, until the time is over; wait for the job's end.

    Prints a schedule that `elastrain run --faults` replays. The exit code is the job's.
    """
    plan, for_s = flags.plan(), flags.for_s()
    show = _as_json if as_json else _as_lines
    job = AskedJob(rundir.find(one_of(run, named)))
    if not job.state().get("armed", True):
        raise ConfigError(NOT_ARMED)
    plan, missing = possible(plan, operator_messages.carried_around(job.folder))
    if missing:
        say(missing)
    return Chaos(job, plan, for_s, show).run()


@dataclass(frozen=True)
class AskedJob:
    """The running job, as its operator sees it."""

    folder: RunDir

    def state(self) -> dict[str, Any]:
        """Return the state of the job. Raises ConfigError, NoAnswerError."""
        return operator_messages.state(self.folder)

    def ask(self, fault: Fault, careful_of: tuple[str, ...] | None) -> Answer:
        """Request a fault. If the job does not answer or has ended, return a refusal instead of raising an error."""
        try:
            return ask(self.folder, fault, careful_of)
        except (ConfigError, operator_messages.NoAnswerError) as error:
            return Answer(ok=False, sentence=str(error))


@dataclass(frozen=True, kw_only=True)
class DrawnFault:
    """Outcome of one drawn fault: it struck, or was passed over.

    `fault` has the time since the job's start; None if there was no possible target.
    """

    draw: Draw
    fault: Fault | None
    struck: bool
    sentence: str


@dataclass(kw_only=True)
class Tally:
    """Counts of the faults so far: all that were drawn, and by class those that struck."""

    drawn: int = 0
    struck: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: DrawnFault) -> None:
        """Count one outcome."""
        self.drawn += 1
        self.struck[outcome.draw.kind] += outcome.struck


class Chaos:
    """One run of the command. `show` takes each outcome, and at the end the summary."""

    def __init__(
        self,
        job: AskedJob,
        plan: ChaosPlan,
        for_s: float,
        show: Callable[[DrawnFault | dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._job, self._plan, self._for_s, self._show = job, plan, for_s, show
        self._clock, self._sleep = clock, sleep
        self._tally, self._maybe_lost = Tally(), MaybeLost()
        self._known = job.state()

    def run(self) -> int:
        """Inject faults until the time is over, wait for the end of the job, and return its exit code."""
        began_s = self._clock()
        for draw in draws(self._plan):
            if draw.at_s > self._for_s:
                break
            if self._ends_before(began_s + draw.at_s):
                break
            outcome = self._strike(draw)
            self._tally.add(outcome)
            self._show(outcome)
        self._ends_before(float("inf"))
        return self._sum_up()

    def _state(self) -> dict[str, Any]:
        """Return the job's state, or its last known state while no agent answers."""
        with suppress(operator_messages.NoAnswerError):
            self._known = self._job.state()
        return self._known

    def _ends_before(self, at_s: float) -> bool:
        """Wait until the given time. Returns True if the job has ended before."""
        while (state := self._state())["exit_code"] is None and state["state"] != "vanished":
            left_s = at_s - self._clock()
            if left_s <= 0:
                return False
            self._sleep(min(left_s, _LOOK_EVERY_S))
        return True

    def _strike(self, draw: Draw) -> DrawnFault:
        state = self._state()
        situation = Situation.of(state)
        fault = aim(draw, situation, self._plan)
        if fault is None:
            return DrawnFault(draw=draw, fault=None, struck=False, sentence=f"{draw.kind} finds no member to strike")
        answer = self._ask(fault, situation)
        placed = replace(fault, place=replace(fault.place, t_s=round(state["running_s"], 3)))
        return DrawnFault(draw=draw, fault=placed, struck=answer.ok, sentence=answer.sentence)

    def _ask(self, fault: Fault, situation: Situation) -> Answer:
        # This command keeps the struck members itself: agents are struck, too, and lose that knowledge.
        doubtful = self._maybe_lost.members(situation.members, self._clock())
        answer = self._job.ask(fault, None if self._plan.reckless else doubtful)
        if answer.ok:
            self._maybe_lost.note(fault, situation.homes, self._clock())
        return answer

    def _sum_up(self) -> int:
        state, tally = self._state(), self._tally
        code = 1 if state["exit_code"] is None else int(state["exit_code"])
        self._show(
            {
                "seed": self._plan.seed,
                "drawn": tally.drawn,
                "struck": tally.struck.total(),
                "classes": {kind: count for kind, count in sorted(tally.struck.items()) if count},
                "step": state["step"],
                "steps_lost": state["steps_lost"],
                "exit_code": code,
                "end": state["end"]["sentence"] if state["end"] else "its launcher has vanished",
            }
        )
        return code


def _as_lines(told: DrawnFault | dict[str, Any]) -> None:
    """Print an outcome as a line of the schedule. Faults that did not strike, and the summary, become comments."""
    if isinstance(told, DrawnFault):
        print(told.fault if told.struck else f"# {told.sentence}", flush=True)
    else:
        for name, value in told.items():
            print(f"# {name}: {value}", flush=True)


def _as_json(told: DrawnFault | dict[str, Any]) -> None:
    if isinstance(told, DrawnFault):
        line = str(told.fault) if told.fault is not None else None
        told = {"number": told.draw.number, "line": line, "struck": told.struck, "sentence": told.sentence}
    print(json.dumps(told), flush=True)
