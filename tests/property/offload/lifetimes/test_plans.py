"""Random steps: every plan can be played within its limit, and hardly any schedule is better."""

from __future__ import annotations

import math
import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from elastrain.offload.planning import program as facts
from elastrain.offload.planning.move_plan import make_plan
from elastrain.offload.planning.plan_values import Budget, Plan, Program, Tier, UnplayableError, ideal_s
from elastrain.offload.planning.replay import replay
from tests.support.programs import all_moves, random_program

SEEDS = st.integers(0, 2**32)
ANOMALY = 1.25
"""A greedy plan may be so much worse with more to use, as schedules can; in the mean it may not."""


def tiers_of(rng: random.Random) -> tuple[Tier, ...]:
    return tuple(
        Tier(
            name=f"drive {number}",
            read_bytes_per_s=rng.choice((5, 30, 200)),
            write_bytes_per_s=rng.choice((5, 30, 200)),
            latency_s=rng.choice((0, 0.01)),
            duplex=rng.random() < 0.3,
        )
        for number in range(rng.randint(1, 3))
    )


def between(program: Program, part: float) -> int:
    """A limit between the least and what is needed where nothing leaves."""
    least, _ = facts.least_bytes(program)
    return int(least + part * (max(facts.needs(program)) - least))


def planned(program: Program, part: float, tiers: tuple[Tier, ...]) -> Plan:
    return make_plan(program, Budget(limit_bytes=between(program, part), tiers=tiers))


@given(SEEDS, st.sampled_from((0.0, 0.3, 0.7, 1.0)))
def test_a_plan_holds_its_limit_and_brings_every_piece_back_in_time(seed: int, part: float) -> None:
    """Replaying raises where a piece is not there, or where memory never becomes free."""
    rng = random.Random(seed)
    program = random_program(rng, points=rng.randint(2, 9), pieces=rng.randint(1, 10))
    found = planned(program, part, tiers_of(rng))
    assert found.played.peak_bytes <= between(program, part)
    assert found.played.step_s >= ideal_s(program.points) - 1e-9


def ratios(seed: int, parts: tuple[float, ...], speeds: tuple[float, ...]) -> list[float]:
    """How much longer the step is with more to use than with less, for each pair of neighbours."""
    rng = random.Random(seed)
    program = random_program(rng, points=rng.randint(3, 9), pieces=rng.randint(2, 10))
    seconds = []
    for part, speed in zip(parts, speeds, strict=True):
        tier = Tier(name="drive", read_bytes_per_s=30 * speed, write_bytes_per_s=40 * speed)
        seconds.append(planned(program, part, (tier,)).played.step_s)
    return [after / before for before, after in pairwise(seconds)]


def test_more_memory_is_no_slower() -> None:
    found = [ratio for seed in range(60) for ratio in ratios(seed, (0.0, 0.25, 0.5, 0.75, 1.0), (1.0,) * 5)]
    assert max(found) < ANOMALY
    assert sum(ratio > 1.001 for ratio in found) < 0.03 * len(found)


def test_a_faster_drive_is_no_slower() -> None:
    found = [ratio for seed in range(60) for ratio in ratios(seed, (0.3,) * 5, (0.25, 0.5, 1.0, 2.0, 4.0))]
    assert max(found) < ANOMALY
    assert sum(ratio > 1.001 for ratio in found) < 0.03 * len(found)


def best_of_all(program: Program, budget: Budget) -> float:
    best_s = math.inf
    for moves in all_moves(program):
        try:
            best_s = min(best_s, replay(program, moves, budget).step_s)
        except UnplayableError:
            continue
    return best_s


def test_hardly_any_schedule_of_a_small_step_is_better() -> None:
    found = []
    for seed in range(60):
        rng = random.Random(1000 + seed)
        program = random_program(rng, points=rng.randint(3, 5), pieces=rng.randint(2, 3))
        if not 1 <= len(facts.gaps(program)) <= 4:
            continue
        tier = Tier(name="drive", read_bytes_per_s=60, write_bytes_per_s=60)
        budget = Budget(limit_bytes=between(program, rng.choice((0.0, 0.3, 0.6))), tiers=(tier,))
        found.append(make_plan(program, budget).played.step_s / best_of_all(program, budget))
    assert len(found) > 30
    assert max(found) < 1.2
    assert sum(found) / len(found) < 1.02
