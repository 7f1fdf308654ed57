"""Every schedule of a very small job: nothing breaks, and what is planted is found by the shortest schedule."""

from __future__ import annotations

import pytest

from tests.sim.cluster import Scenario
from tests.sim.exhaustive import explore
from tests.sim.plants import PLANTS


def _two_members(faults: int) -> Scenario:
    return Scenario(members=2, runs=2, crashes=faults, backups=1, steps=1, small=True)


def test_every_order_of_what_two_members_say_ends_the_job() -> None:
    found = explore(_two_members(faults=0), at_once=True)
    assert found.is_whole, found.violation
    assert set(found.outcomes) == {"ok"}
    assert found.states > 100


@pytest.mark.on_demand
def test_a_death_at_any_point_of_any_schedule_of_two_members_changes_nothing() -> None:
    found = explore(_two_members(faults=1), at_once=True)
    assert found.is_whole, found.violation
    assert set(found.outcomes) == {"ok"}


def test_the_shortest_schedule_of_a_planted_bug_is_found() -> None:
    with PLANTS["VotesWithoutBackups"].patch():
        found = explore(_two_members(faults=1), at_once=True, limit=1000)
    assert found.violation
    assert 5 < len(found.schedule) < 20
