"""From journals to figures: pure. Times are monotonic seconds that all processes of one host share."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from elastrain.pipeline.pipeline_plan import Pipeline, PipelinePlan

Line = Mapping[str, Any]
Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Action:
    """A forward or a backward of one micro-batch through the blocks `[begin, end)`."""

    member: str
    step: int
    kind: str
    run: int
    micro_batch: int
    begin: int
    end: int
    span: Span


def actions(journals: Mapping[str, Sequence[Line]]) -> list[Action]:
    """What members say of themselves."""
    return [
        Action(
            member=member,
            step=line["step"],
            kind=line["kind"],
            run=line["run"],
            micro_batch=line["micro_batch"],
            begin=line["begin"],
            end=line["end"],
            span=(line["started_s"], line["t"]),
        )
        for member, lines in journals.items()
        for line in lines
        if line["event"] == "task"
    ]


def passed_s(lines: Iterable[Line]) -> dict[int, float]:
    """Step -> when this member held its record."""
    return {line["step"]: line["t"] for line in lines if line["event"] == "passed"}


def step_lengths_s(lines: Iterable[Line]) -> dict[int, float]:
    """Step -> time from the record before it to its own."""
    times = sorted(passed_s(lines).items())
    return {step: later - earlier for (_, earlier), (step, later) in pairwise(times)}


def step_s(lines: Iterable[Line]) -> float:
    """Median time from record to record, of steps that were computed in pipelines: the first one was not."""
    return statistics.median(step_lengths_s(lines).values())


def plan_in_force(lines: Iterable[Line], step: int) -> PipelinePlan:
    """The plan by which a step was computed, where no bound differs from run to run."""
    told = max((line for line in lines if line["event"] == "plan" and line["step"] <= step), key=lambda x: x["step"])
    found = []
    for each in told["pipelines"]:
        ends = [end for _, end in each["blocks"].values()]
        assert [begin for begin, _ in each["blocks"].values()] == [0, *ends[:-1]], "a bound that differs"
        found.append(
            Pipeline(
                members=tuple(each["blocks"]),
                cuts=tuple(ends[:-1]),
                share=each["runs"],
                limits=tuple(each["limits"]),
                is_split=told["is_split"],
            )
        )
    return PipelinePlan(blocks=ends[-1], pipelines=tuple(found))


def standstill_s(done: Iterable[Action], survivors: Iterable[str], since_s: float, until_s: float) -> float:
    """The longest time from the kill on in which no survivor computes."""
    alive = set(survivors)
    spans = sorted(each.span for each in done if each.member in alive and each.span[1] > since_s)
    longest, busy_until = 0.0, since_s
    for start, end in spans:
        if start > until_s:
            break
        longest = max(longest, start - busy_until)
        busy_until = max(busy_until, end)
    return longest


def pairs(done: Iterable[Action], step: int) -> dict[tuple[int, int], int]:
    """(block, run) -> how often it went backward, whole, in that step."""
    found: dict[tuple[int, int], int] = {}
    for each in done:
        if each.step == step and each.kind == "backward":
            for block in range(each.begin, each.end):
                found[block, each.run] = found.get((block, each.run), 0) + 1
    return found


def redone_ratio(done: Sequence[Action], *, step: int, lost: str) -> float:
    """(block, run) pairs that were computed more than once in that step, over those that the lost member had done."""
    of_lost = pairs([each for each in done if each.member == lost], step)
    times = pairs(done, step)
    again = sum(count - 1 for count in times.values())
    return again / len(of_lost) if of_lost else 0.0


def orphan_s(journals: Mapping[str, Sequence[Line]], *, step: int, lost: str) -> float | None:
    """From when a survivor knew of the loss to the first action elsewhere with a block that only the lost one had."""
    done = actions(journals)
    had = {block for each in done if each.member == lost and each.step == step for block in range(each.begin, each.end)}
    known_s = min(
        (
            line["t"]
            for lines in journals.values()
            for line in lines
            if line["event"] == "lost" and line["peer"] == lost
        ),
        default=None,
    )
    if known_s is None:
        return None
    begun = [
        each.span[0]
        for each in done
        if each.member != lost and each.span[0] >= known_s and had & set(range(each.begin, each.end))
    ]
    return min(begun) - known_s if begun else None


def samples_amiss(journals: Mapping[str, Sequence[Line]], steps: int) -> tuple[int, int]:
    """(steps that nobody passed, steps of which members tell different samples)."""
    told: dict[int, set[tuple[int, int]]] = {}
    for lines in journals.values():
        for line in lines:
            if line["event"] == "passed":
                told.setdefault(line["step"], set()).add((line["samples"], line["fingerprint"]))
    return steps - len(told), sum(len(each) > 1 for each in told.values())
