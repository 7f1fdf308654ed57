"""From what became of the cells to figures. Pure: values in, values out."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from experiments.faults.cells import Answer, Cell
from experiments.journals import Run

CRASHES = ("kill", "segfault", "abort")
HANGS = ("hang", "stop")
PUT_RIGHT = re.compile(
    r"^step anew: .*(?: after step (\d+) .* has published it| take over shard .* after step (\d+): .*"
    r"| after step (\d+) .*: its own was wrong in its memory)$"
)
"""Why a view was made: parameters after this step were wrong, and were put right before the next one was committed."""


@dataclass(kw_only=True)
class Outcome:
    """What became of one cell; an empty `reason` says that all is as promised."""

    cell: Cell
    struck_s: float | None = None
    ended_s: float | None = None
    """When all members trained again, or the job had ended."""
    victim: str = ""
    standstill_s: float | None = None
    """The longest time without a commit, from the strike until all trained again."""
    detect_s: float | None = None
    reason: str = ""
    nothing_struck: str = ""
    """Why the fault found nothing to strike at its place, if so: then the promise was kept by doing nothing."""
    cut_short: bool = False
    """The experiment was ended meanwhile: no verdict."""
    hang: bool = False
    mismatch: bool = False
    lost_samples: int = 0
    leftovers: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return not self.reason


def without_flipped(
    members: Mapping[str, Sequence[str]], run: Run, flipped_s: Mapping[str, float | None]
) -> dict[str, list[str]]:
    """The lines of steps, less those of members that were lost by a flipped bit, from that bit on.

    Such a member may tell a wrong digest of its own memory until it is found, which is before it votes again.
    """
    found = {name: list(lines) for name, lines in members.items()}
    for name, at_s in flipped_s.items():
        if name in found and at_s is not None and run.view_without(name) is not None:
            passed = [p.step for p in run.members[name].passed if p.at_s < at_s]
            found[name] = [line for line in found[name] if int(line.split()[0]) < max(passed, default=0)]
    return found


def ended_after(steps: int, lines: Sequence[str]) -> list[str]:
    """A job's lines as they would be if it had had so many steps; the last one has the digest that it ends with."""
    if steps >= len(lines) - 1:
        return list(lines)
    return [*lines[:steps], f"{steps} {lines[steps - 1].split()[1]}"]


def put_right(run: Run) -> frozenset[int]:
    """Steps after which the job itself has found that all had got wrong parameters, and begun the next step anew."""
    found = [PUT_RIGHT.match(view.reason) for view in run.views]
    return frozenset(int(match[match.lastindex or 1]) for match in found if match)


def without_put_right(members: Mapping[str, Sequence[str]], run: Run) -> dict[str, list[str]]:
    """The lines of steps, less those that the job took back.

    The next step's lines show whether it did so well; after the last step, the line of the job's end does.
    """
    wrong = put_right(run)
    return {name: [line for line in lines if int(line.split()[0]) not in wrong] for name, lines in members.items()}


def commits_s(run: Run) -> list[float]:
    """When each step was first known to be committed, in order."""
    first: dict[int, float] = {}
    for member in run.members.values():
        for passed in member.passed:
            first[passed.step] = min(passed.at_s, first.get(passed.step, passed.at_s))
    return sorted(first.values())


def standstill_s(commits: Sequence[float], from_s: float, until_s: float) -> float:
    """The longest time without a commit that touches `from_s..until_s`, counted from `from_s`."""
    inside = [from_s, *(at_s for at_s in commits if from_s < at_s < until_s), until_s]
    return max(later - earlier for earlier, later in pairwise(inside))


def detected_after_s(run: Run, victim: str, struck_s: float) -> float | None:
    """Until the first agent or member knew that the victim hangs or has died; None if nobody ever did."""
    known = [run.hangs_s[victim]] if victim in run.hangs_s else []
    known += [member.lost_s[victim] for member in run.members.values() if victim in member.lost_s]
    known += [run.deaths_s[victim]] if victim in run.deaths_s else []
    later = [at_s for at_s in known if at_s >= struck_s]
    return min(later) - struck_s if later else None


def struck_s(run: Run, victim: str, at_s: float) -> float:
    """When this one of several victims was struck; `at_s` where it has not said so itself."""
    told = run.members.get(victim)
    return told.faults[-1].at_s if told is not None and told.faults else at_s


def refusal(run: Run, victims: Iterable[str], since_s: float) -> str:
    """What a victim said of a fault that found nothing to strike, since then; empty if none did."""
    told = [each for name in victims if name in run.members for each in run.members[name].refused]
    return next((reason for at_s, reason in told if at_s >= since_s), "")


def blamed(cells: Sequence[Outcome], step_at_s: float | None) -> int | None:
    """Which of the cells of one job a wrong step is owed to: the last one struck before it; None if none was."""
    struck = [(each.struck_s, index) for index, each in enumerate(cells) if each.struck_s is not None]
    before = [index for at_s, index in struck if step_at_s is None or at_s <= step_at_s]
    return before[-1] if before else (0 if cells else None)


def figures(outcomes: Iterable[Outcome], *, usual_s: float | None, legal: int) -> dict[str, Any]:
    """The keys of the README."""
    outcomes = list(outcomes)
    goes_on = [each for each in outcomes if each.cell.way.answer not in (Answer.ENDS, Answer.GOES_BACK)]
    in_a_step = [each for each in outcomes if is_in_a_step(each.cell)]
    return {
        "legal_cells": legal,
        "cells": len(outcomes),
        "passed": sum(each.passed for each in outcomes),
        "failed": len([each for each in outcomes if not each.passed]),
        "digest_mismatches": sum(each.mismatch for each in outcomes),
        "lost_samples": sum(each.lost_samples for each in outcomes),
        "hangs": sum(each.hang for each in outcomes),
        "leftovers": sum(len(each.leftovers) for each in outcomes),
        "slowest_recovery_s": _most(each.standstill_s for each in goes_on if each.passed and is_in_a_step(each.cell)),
        "detect_crash_s": _middle(_of(outcomes, CRASHES)),
        "detect_crash_worst_s": _most(_of(outcomes, CRASHES)),
        "detect_hang_s": _most(_of(in_a_step, HANGS)),
        "detect_hang_steps": _in_steps(_most(_of(in_a_step, HANGS)), usual_s),
        "detect_hang_between_steps_s": _most(_of((each for each in outcomes if not is_in_a_step(each.cell)), HANGS)),
        "detect_blackhole_s": _most(_of(outcomes, ("partition",))),
        "usual_step_s": usual_s,
        "nothing_struck": [f"{each.cell}: {each.nothing_struck}" for each in outcomes if each.nothing_struck],
        "failed_cells": [f"{each.cell}: {each.reason}" for each in outcomes if not each.passed],
    }


def is_in_a_step(cell: Cell) -> bool:
    """Behind the last step a script is in code of its own, which has the time that it has between two steps."""
    return cell.phase != "shutdown"


def _of(outcomes: Iterable[Outcome], kinds: Sequence[str]) -> list[float]:
    """Detection where the one struck is really lost."""
    return [
        each.detect_s
        for each in outcomes
        if each.detect_s is not None and each.cell.way.kind in kinds and each.cell.way.loses
    ]


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _middle(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _in_steps(seconds: float | None, usual_s: float | None) -> float | None:
    return None if seconds is None or not usual_s else seconds / usual_s
