"""Text report of a plan beside the measured step: memory by kind, transfers on each tier, waits.

Pure; `plan_picture.py` draws the same values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastrain.offload.planning import program as facts
from elastrain.offload.planning.io_schedule import PointRing
from elastrain.offload.planning.orders import Arrival
from elastrain.offload.planning.plan_values import Kind, Plan, Tier
from elastrain.offload.planning.profile import size
from elastrain.offload.planning.step_recording import HELD
from elastrain.offload.report.what_if import lasts_years

COLUMNS = 60
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class StepCourse:
    """The course of one step, point by point, planned or measured.

    `held_bytes` has one row per kind, in the order of `HELD`. `moved_bytes` has one pair per tier: bytes written, bytes
    read.
    """

    seconds: tuple[float, ...]
    waited_s: tuple[float, ...]
    held_bytes: tuple[tuple[int, ...], ...]
    moved_bytes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @property
    def step_s(self) -> float:
        """Seconds of the whole step, waits included."""
        return sum(self.seconds) + sum(self.waited_s)

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes in memory at the end of a point."""
        return max(map(sum, zip(*self.held_bytes, strict=True)), default=0)

    def total_bytes(self, tier: int, *, reads: bool) -> int:
        """Return the bytes that the step reads from a tier (`reads`), or writes to it."""
        return sum(self.moved_bytes[tier][reads])


def happened(points: Sequence[Arrival], tiers: int) -> StepCourse:
    """Return the measured course. Points without details count as if they held and moved nothing."""
    looked = [each.standing for each in points]
    held = [(0,) * len(HELD) if each is None else each.held_bytes for each in looked]
    moved = [((0, 0),) * tiers if each is None else each.moved_bytes for each in looked]
    return StepCourse(
        seconds=tuple(each.seconds for each in points),
        waited_s=tuple(0.0 if each is None else each.waited_s for each in looked),
        held_bytes=tuple(zip(*held, strict=True)),
        moved_bytes=tuple(
            (tuple(each[tier][0] for each in moved), tuple(each[tier][1] for each in moved)) for tier in range(tiers)
        ),
    )


def planned(plan: Plan, tiers: int) -> StepCourse:
    """Return the planned course. A transfer counts at the point at which it begins."""
    points, length = plan.program.points, len(plan.program.points)
    moved = [([0] * length, [0] * length) for _ in range(tiers)]
    for move in plan.moves:
        for share in move.shares:
            moved[share.tier][1][move.read_at % length] += share.size_bytes
            if move.write_after is not None:
                moved[share.tier][0][move.write_after % length] += share.size_bytes
    again_s = [0.0] * length
    for each in plan.recomputed:
        again_s[each.again % length] += each.seconds
    return StepCourse(
        seconds=tuple(point.seconds + more for point, more in zip(points, again_s, strict=True)),
        waited_s=plan.played.stalls_s or (0.0,) * length,
        held_bytes=_held(plan),
        moved_bytes=tuple((tuple(written), tuple(read)) for written, read in moved),
    )


def _held(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return the planned memory by kind at each point. Pieces that are out, ended, or dropped do not count."""
    length = len(plan.program.points)
    rings = {kind: PointRing([0.0] * length) for kind in HELD}
    rings[Kind.TEMPORARY] = PointRing([float(point.extra_bytes) for point in plan.program.points])
    for piece in plan.program.pieces:
        rings[piece.kind].add(0, length, piece.size_bytes)
        for begin, end, begins_anew in facts.neighbours(piece, length):
            if begins_anew:
                rings[piece.kind].add(begin + 1, end, -piece.size_bytes)
    for move in plan.moves:
        piece = plan.program.pieces[move.gap.piece]
        rings[piece.kind].add(move.gap.begin + 1, move.read_at, -piece.size_bytes)
    for again in plan.recomputed:
        for number in again.pieces:
            piece = plan.program.pieces[number]
            rings[piece.kind].add(again.after + 1, again.again, -piece.size_bytes)
    return tuple(tuple(int(value) for value in rings[kind].values) for kind in HELD)


# Text.


def render(plan: Plan, seen: StepCourse, tiers: Sequence[Tier], limit_bytes: int, rating_bytes: float | None) -> str:
    """Return the whole report: figures side by side, then curves over the step, planned above measured."""
    wished = planned(plan, len(tiers))
    lines = [
        f"plan      {plan.reason}",
        "",
        *_row("", "planned", "happened"),
        *_row("step", f"{plan.played.step_s:.3f} s", f"{seen.step_s:.3f} s"),
        *_row("stalls", f"{sum(plan.played.stalls_s):.3f} s", f"{sum(seen.waited_s):.3f} s"),
        *_row("memory", size(plan.played.peak_bytes), f"{size(seen.peak_bytes)} of {size(limit_bytes)} allowed"),
    ]
    for number, tier in enumerate(tiers):
        for reads, word in ((False, "written"), (True, "read")):
            totals = [size(course.total_bytes(number, reads=reads)) for course in (wished, seen)]
            lines += _row(f"{word}, {tier.name}", *totals)
        if rating_bytes is not None and not tier.is_memory:
            lines += _row(f"life, {tier.name}", *(_life(each, number, rating_bytes) for each in (wished, seen)))
    return "\n".join([*lines, "", *_curves(wished, seen, tiers)])


def _row(name: str, *cells: str) -> list[str]:
    return [f"{name:<32}{cells[0]:>14}  {'  '.join(cells[1:])}"]


def _life(course: StepCourse, tier: int, rating_bytes: float) -> str:
    return f"{lasts_years(course.total_bytes(tier, reads=False), course.step_s, rating_bytes):.3g} years"


def _curves(wished: StepCourse, seen: StepCourse, tiers: Sequence[Tier]) -> list[str]:
    lines = []
    for kind, one, other in zip(HELD, wished.held_bytes, seen.held_bytes, strict=True):
        name = "temporaries" if kind is Kind.TEMPORARY else f"{kind.value}s".replace("activations", "saved activations")
        lines += _pair(name, (wished, one), (seen, other), is_sum=False)
    for number, tier in enumerate(tiers):
        for place, word in enumerate(("written to", "read from")):
            pair = [(each, each.moved_bytes[number][place]) for each in (wished, seen)]
            lines += _pair(f"{word} {tier.name}", pair[0], pair[1], is_sum=True)
    return lines


def _pair(
    name: str, one: tuple[StepCourse, Sequence[int]], other: tuple[StepCourse, Sequence[int]], *, is_sum: bool
) -> list[str]:
    columns = [columns_of(course, values, is_sum=is_sum) for course, values in (one, other)]
    top = max(map(max, columns))
    if not top:
        return []
    head = f"{name}, at most {size(top)}" if not is_sum else name
    return [
        head,
        *(f"  {word:<9}{bars(each, top)}" for word, each in zip(("planned", "happened"), columns, strict=True)),
    ]


def columns_of(course: StepCourse, values: Sequence[int], *, is_sum: bool, columns: int = COLUMNS) -> list[float]:
    """Resample values of points to columns of equal time: the highest value in each, or with `is_sum` the sum."""
    found, at_s = [0.0] * columns, 0.0
    total_s = course.step_s or 1.0
    for seconds, waited_s, value in zip(course.seconds, course.waited_s, values, strict=True):
        first = min(columns - 1, int(at_s / total_s * columns))
        at_s += seconds + waited_s
        last = max(first, min(columns - 1, int(at_s / total_s * columns)))
        if is_sum:
            found[first] += value
        else:
            found[first : last + 1] = [max(value, each) for each in found[first : last + 1]]
    return found


def bars(values: Iterable[float], top: float) -> str:
    """Return one character for each value, by its height relative to `top`."""
    return "".join(BARS[min(len(BARS) - 1, int(-(-value * (len(BARS) - 1) // top)))] for value in values)
