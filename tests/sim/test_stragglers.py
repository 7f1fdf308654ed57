"""Whole jobs in which members are slow for long: they get less to do, then lose their place, beside other faults.

`ELASTRAIN_SIM_STRAGGLERS` is how many are played, in three parts: 24 take some ten seconds.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.sim.job.straggler_plants import PLANTS
from tests.sim.job.straggler_schedules import draw_stragglers
from tests.sim.job.world import World, outcome

SCHEDULES = int(os.environ.get("ELASTRAIN_SIM_STRAGGLERS", "24"))
PARTS = 3


@pytest.mark.parametrize("part", range(PARTS))
def test_a_straggler_gets_less_then_goes_and_nothing_goes_with_it(part: int) -> None:
    seeds = range(part, SCHEDULES, PARTS)
    seen: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    for seed in seeds:
        lines: list[str] = []
        world = World(draw_stragglers(seed), lines.append)
        try:
            world.run()
        except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
            broken.append((seed, f"{type(error).__name__}: {error}"))
        seen[outcome(world)] += 1
        seen["smaller share"] += sum(": shares " in line and "by their speeds" in line for line in lines)
        seen["ended"] += sum(": straggler " in line for line in lines)
    assert broken == []
    assert seen["finished"] >= 0.7 * len(seeds), seen
    assert seen["smaller share"] >= 0.5 * len(seeds), seen
    assert seen["ended"] >= 0.2 * len(seeds), seen


@pytest.mark.parametrize("name", sorted(PLANTS))
def test_a_planted_bug_is_found(name: str) -> None:
    assert PLANTS[name].search.find() is not None, PLANTS[name].rule
