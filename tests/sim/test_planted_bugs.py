"""Is the simulator sharp? Every planted bug has to be found within the stated number of schedules."""

from __future__ import annotations

from itertools import count, islice

import pytest

from tests.sim.plants import PLANTS
from tests.sim.scenarios import cluster_of, draw


def first_finding(name: str) -> tuple[int, str] | None:
    """Seed and message of the first schedule that the planted bug breaks."""
    plant = PLANTS[name]
    for seed in islice((seed for seed in count() if plant.only(draw(seed))), plant.within):
        cluster = cluster_of(seed, plant.core, plant.cluster)
        try:
            with plant.patch():
                cluster.run(limit=5_000)
        except (AssertionError, KeyError, IndexError, StopIteration, ValueError) as found:
            return seed, f"{type(found).__name__}: {found}"
    return None


@pytest.mark.parametrize("name", sorted(PLANTS))
def test_planted_bug_is_found(name: str) -> None:
    assert first_finding(name) is not None, f"{PLANTS[name].rule} Nothing found in {PLANTS[name].within} schedules."


def test_there_are_enough_of_them_and_each_states_its_rule() -> None:
    assert len(PLANTS) >= 15
    assert all(plant.rule.endswith(".") for plant in PLANTS.values())
