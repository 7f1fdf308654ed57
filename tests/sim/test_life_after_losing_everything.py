"""Whole jobs that write checkpoints and lose everything: they go on by themselves, on every node, to the same bits.

`ELASTRAIN_SIM_LIVES` is how many are played: 40 take about two seconds.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.sim.job.life_plants import PLANTS
from tests.sim.job.schedule import draw_lives, from_text, to_text
from tests.sim.job.world import World, outcome

SCHEDULES = int(os.environ.get("ELASTRAIN_SIM_LIVES", "40"))


def _play(first: int, count: int) -> Counter[str]:
    ended: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    for seed in range(first, first + count):
        world = World(draw_lives(seed))
        try:
            world.run()
        except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
            broken.append((seed, f"{type(error).__name__}: {error}"))
        ended[outcome(world)] += 1
        ended["lives"] += len(world.lives.every())
        ended["checkpoints"] += len(world.disk.folders)
    assert broken == []
    return ended


def test_a_job_goes_on_in_another_life_or_ends_with_a_sentence() -> None:
    ended = _play(0, SCHEDULES)
    assert ended["finished"] >= 0.6 * SCHEDULES, ended
    assert ended["lives"] >= 1.25 * SCHEDULES, ended


@pytest.mark.parametrize("name", sorted(PLANTS))
def test_a_planted_bug_is_found(name: str) -> None:
    assert PLANTS[name].search.find() is not None, PLANTS[name].rule


def test_a_schedule_is_a_value_that_replays() -> None:
    for seed in range(3):
        schedule = from_text(to_text(draw_lives(seed)))
        lines: list[list[str]] = [[], []]
        for told in lines:
            World(schedule, told.append).run()
        assert lines[0] == lines[1]
