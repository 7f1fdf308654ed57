"""Answers to what-if questions about a step: other limits, drives, host memory, prices.

Each answer comes from a plan and its replay. Pure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from elastrain.offload.planning.orders import SeenStep
from elastrain.offload.planning.plan_search import choose
from elastrain.offload.planning.plan_values import LimitBelowLeastError, Plan, Tier, UnplayableError, ideal_s
from elastrain.offload.planning.profile import lasts_years, size

HOUR_S = 3600.0
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices per hour, in any currency.

    `machine` is the machine without the memory in question, and `memory` is a GiB of that memory. `drive` is one drive,
    and `host` is a GiB of host memory.
    """

    machine: float = 0.0
    memory: float = 0.0
    drive: float = 0.0
    host: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Question:
    """The memory limits and numbers of equal drives to examine in all combinations.

    `rating_bytes` is the number of bytes that one drive may be written in its life. `host` is a tier of host memory.
    """

    limits_bytes: tuple[int, ...]
    counts: tuple[int, ...]
    drive: Tier
    host: Tier | None = None
    rating_bytes: float | None = None
    prices: Prices | None = None


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The answer for one memory limit and number of drives.

    If there is no plan, `refused` says why, and the figures are zero. `of_ideal` is the step time with unlimited memory
    divided by this step time. `years` is the life of the drive that is written most, or None without a rating.
    `steps_per_price` is the number of steps that one unit of money buys.
    """

    limit_bytes: int
    drives: int
    refused: str = ""
    step_s: float = 0.0
    of_ideal: float = 0.0
    stalled_s: float = 0.0
    written_bytes: int = 0
    read_bytes: int = 0
    years: float | None = None
    steps_per_price: float | None = None


def what_if(step: SeenStep, question: Question) -> list[WhatIf]:
    """Return the answers for each limit with each number of drives, in the order of the question."""
    return [_answer(step, question, limit, count) for limit in question.limits_bytes for count in question.counts]


def _answer(step: SeenStep, question: Question, limit_bytes: int, count: int) -> WhatIf:
    drives = [replace(question.drive, name=f"drive {number + 1}") for number in range(count)]
    tiers = (*drives, *(() if question.host is None else (question.host,)))
    try:
        plan = choose(step, limit_bytes, tiers).plan
    except (LimitBelowLeastError, UnplayableError) as error:
        return WhatIf(limit_bytes=limit_bytes, drives=count, refused=str(error))
    step_s = plan.played.step_s
    return WhatIf(
        limit_bytes=limit_bytes,
        drives=count,
        step_s=step_s,
        of_ideal=ideal_s(plan.program.points) / step_s if step_s else 1.0,
        stalled_s=sum(plan.played.stalls_s),
        written_bytes=plan.played.written_bytes,
        read_bytes=plan.played.read_bytes,
        years=None if question.rating_bytes is None else _years(plan, count, question.rating_bytes),
        steps_per_price=_steps_per_price(question, step_s, limit_bytes, count),
    )


def _years(plan: Plan, drives: int, rating_bytes: float) -> float:
    """Return the life of the drive that is written most, in years of steps. The first tiers are drives."""
    written = Counter[int]()
    for move in plan.moves:
        for share in move.shares if move.write_after is not None else ():
            written[share.tier] += share.size_bytes
    return lasts_years(max(written[number] for number in range(drives)), plan.played.step_s, rating_bytes)


def _steps_per_price(question: Question, step_s: float, limit_bytes: int, count: int) -> float | None:
    prices = question.prices
    if prices is None or not step_s:
        return None
    host_bytes = 0 if question.host is None else question.host.capacity_bytes or 0
    memory = prices.memory * limit_bytes / GIB + prices.host * host_bytes / GIB
    hour = prices.machine + memory + prices.drive * count
    return HOUR_S / step_s / hour if hour else None


COLUMNS = ("memory", "drives", "of ideal", "step", "stalls", "written", "read", "life", "steps per price")


def row(found: WhatIf) -> tuple[str, ...]:
    """Return one answer as a table row with the columns `COLUMNS`."""
    head = (size(found.limit_bytes), str(found.drives))
    if found.refused:
        return (*head, found.refused, *[""] * (len(COLUMNS) - 3))
    years = "-" if found.years is None else "no end" if found.years == float("inf") else f"{found.years:.3g} years"
    return (
        *head,
        f"{found.of_ideal:.3f}",
        f"{found.step_s:.4g} s",
        f"{found.stalled_s:.3g} s",
        size(found.written_bytes),
        size(found.read_bytes),
        years,
        "-" if found.steps_per_price is None else f"{found.steps_per_price:.4g}",
    )
