"""Whole jobs whose nodes have disks of their own: later lives go on from the newest checkpoint that is whole there.

`ELASTRAIN_SIM_DISKS` is how many are played: 40 take about two seconds.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.sim.job.disk_plants import PLANTS
from tests.sim.job.disk_schedules import draw_disks
from tests.sim.job.node_disks import NodeDisks, Seen, newest_whole
from tests.sim.job.schedule import from_text, to_text
from tests.sim.job.world import World, outcome

SCHEDULES = int(os.environ.get("ELASTRAIN_SIM_DISKS", "40"))


def test_a_life_goes_on_from_the_newest_that_is_whole_on_the_disks_or_says_why_not() -> None:
    ended: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    for seed in range(SCHEDULES):
        world = World(draw_disks(seed))
        try:
            world.run()
        except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
            broken.append((seed, f"{type(error).__name__}: {error}"))
        ended[outcome(world)] += 1
        ended["lives"] += len(world.lives.every())
        assert isinstance(world.disk, NodeDisks)
        ended["checkpoints"] += len(world.disk.records)
    assert broken == []
    assert ended["finished"] >= 0.5 * SCHEDULES, ended
    assert ended["lives"] >= 1.1 * SCHEDULES, ended
    assert ended["checkpoints"] >= SCHEDULES, ended


@pytest.mark.parametrize("name", sorted(PLANTS))
def test_a_planted_bug_is_found(name: str) -> None:
    assert PLANTS[name].search.find() is not None, PLANTS[name].rule


def test_a_schedule_is_a_value_that_replays() -> None:
    for seed in range(3):
        schedule = from_text(to_text(draw_disks(seed)))
        lines: list[list[str]] = [[], []]
        for told in lines:
            World(schedule, told.append).run()
        assert lines[0] == lines[1]


def test_a_checkpoint_is_whole_where_disks_together_have_all_of_it_and_one_its_manifest() -> None:
    name, older = "life-0001-step-0000000003", "life-0001-step-0000000001"
    one = Seen(manifests=frozenset([name, older]), copies={name: frozenset([-1, 0]), older: frozenset([-1, 0, 1])})
    other = Seen(manifests=frozenset(), copies={name: frozenset([1])})
    assert newest_whole([one, other], 2) == name
    assert newest_whole([one], 2) == older
    assert newest_whole([other], 2) == ""
