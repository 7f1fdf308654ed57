"""Courses of a step: memory, transfers and waits, point by point, as measured or as planned.

Pure. `show.py` prints courses, and `plot.py` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add, itemgetter

from elastrain.offload.planning.plan_values import Kind, Plan, Tier
from elastrain.offload.planning.profile import PassProfile, StepProfile
from elastrain.offload.planning.program import neighbours
from elastrain.offload.planning.step_recording import HELD, Standing

COLUMNS = 60
NAMES = {Kind.ACTIVATION: "saved activations", Kind.TEMPORARY: "temporaries"}


@dataclass(frozen=True, kw_only=True)
class CourseRow:
    """Bytes at each point: those in one place, or those moved since the point before (`is_sum`)."""

    name: str
    values: Sequence[int]
    is_sum: bool = False


@dataclass(frozen=True, kw_only=True)
class StepCourse:
    """The course of one step.

    The `held` rows add up to all memory, or to all saved bytes of a pass. `moved` has two rows per tier: bytes written,
    bytes read.
    """

    seconds: Sequence[float]
    waited_s: Sequence[float]
    held: tuple[CourseRow, ...]
    moved: tuple[CourseRow, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds of the whole step, waits included."""
        return sum(self.seconds) + sum(self.waited_s)

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes in memory at the end of a point."""
        return max(map(sum, zip(*(row.values for row in self.held), strict=True)), default=0)

    def total_bytes(self, tier: int, *, reads: bool) -> int:
        """Return the bytes that the step reads from a tier (`reads`), or writes to it."""
        return sum(self.moved[2 * tier + reads].values)

    def ends_s(self) -> list[float]:
        """Return the time at which the step begins, and the time at which each point ends."""
        return list(accumulate(map(add, self.seconds, self.waited_s), initial=0.0))

    def columns(self, row: CourseRow) -> list[int]:
        """Resample a row to `COLUMNS` columns of equal time: the highest value in each, or the sum if it `is_sum`."""
        found, scale = [0] * COLUMNS, COLUMNS / (self.step_s or 1.0)
        places = [min(COLUMNS - 1, int(at_s * scale)) for at_s in self.ends_s()]
        for (first, last), value in zip(pairwise(places), row.values, strict=True):
            for column in range(first, first + 1 if row.is_sum else last + 1):
                found[column] = found[column] + value if row.is_sum else max(found[column], value)
        return found


def of_pass(measured: PassProfile) -> StepCourse:
    """Return the course of a pass: saved bytes in memory, and those on disk. Waits are part of its seconds."""
    changes = [(0.0, 0, 0)]
    changes += [(at_s, now - before, 0) for (_, before), (at_s, now) in pairwise([(0.0, 0), *measured.timeline])]
    changes += [(each.saved_s + each.stalled_s, 0, each.size_bytes) for each in measured.lifetimes]
    changes += [(each.released_s, 0, -each.size_bytes) for each in measured.lifetimes]
    changes.sort(key=itemgetter(0))
    at_s = [each for each, _, _ in changes]
    memory = list(accumulate(more_bytes for _, more_bytes, _ in changes))
    all_saved = accumulate(more_bytes for _, _, more_bytes in changes)
    disk = [max(0, whole - part) for whole, part in zip(all_saved, memory, strict=True)]
    return StepCourse(
        seconds=[end_s - begin_s for begin_s, end_s in pairwise([*at_s, max(at_s[-1], measured.total_s)])],
        waited_s=[0.0] * len(at_s),
        held=(CourseRow(name="in memory", values=memory), CourseRow(name="on disk, or on its way", values=disk)),
    )


def of_step(profile: StepProfile) -> dict[str, StepCourse]:
    """Return the planned and the measured course of a step. Points without details count as if they did nothing."""
    plan, points = profile.plan, profile.seen.points
    seconds = [point.seconds for point in plan.program.points]
    for again in plan.recomputed:
        seconds[again.again % len(seconds)] += again.seconds
    nothing = Standing(held_bytes=(0,) * len(HELD), waited_s=0.0, moved_bytes=((0, 0),) * len(profile.tiers))
    measured = [each.standing or nothing for each in points]
    return {
        "planned": _course(seconds, _planned(plan, len(profile.tiers)), profile.tiers),
        "happened": _course([each.seconds for each in points], measured, profile.tiers),
    }


def _course(seconds: Sequence[float], standings: Sequence[Standing], tiers: Sequence[Tier]) -> StepCourse:
    return StepCourse(
        seconds=seconds,
        waited_s=[each.waited_s for each in standings],
        held=tuple(
            CourseRow(name=NAMES.get(kind, f"{kind.value}s"), values=[each.held_bytes[place] for each in standings])
            for place, kind in enumerate(HELD)
        ),
        moved=tuple(
            CourseRow(name=f"{word} {tier.name}", values=[each.moved_bytes[n][way] for each in standings], is_sum=True)
            for n, tier in enumerate(tiers)
            for way, word in enumerate(("written to", "read from"))
        ),
    )


def _planned(plan: Plan, tiers: int) -> list[Standing]:
    """Return the plan as measurements. A transfer counts at the point at which it begins.

    Pieces that are out, ended, or dropped are not in memory.
    """
    pieces, length = plan.program.pieces, len(plan.program.points)
    absent = [
        (number, begin, end)
        for number, piece in enumerate(pieces)
        for begin, end, begins_anew in neighbours(piece, length)
        if begins_anew
    ]
    absent += [(move.gap.piece, move.gap.begin, move.read_at) for move in plan.moves]
    absent += [(number, again.after, again.again) for again in plan.recomputed for number in again.pieces]
    whole = [sum(piece.size_bytes for piece in pieces if piece.kind is kind) for kind in HELD]
    held = [list(whole) for _ in range(length)]
    for number, begin, end in absent:
        for place in range(begin + 1, end):
            held[place % length][HELD.index(pieces[number].kind)] -= pieces[number].size_bytes
    moved = [[[0, 0] for _ in range(tiers)] for _ in range(length)]
    for move in plan.moves:
        for share in move.shares:
            moved[move.read_at % length][share.tier][1] += share.size_bytes
            if move.write_after is not None:
                moved[move.write_after % length][share.tier][0] += share.size_bytes
    return [
        Standing(
            held_bytes=(*held[place][:-1], held[place][-1] + point.extra_bytes),
            waited_s=plan.played.stalls_s[place] if plan.played.stalls_s else 0.0,
            moved_bytes=tuple((written, read) for written, read in moved[place]),
        )
        for place, point in enumerate(plan.program.points)
    ]
