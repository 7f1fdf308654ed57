"""Every schedule of a very small job: nothing breaks, and what is planted is found by the shortest schedule."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest

from tests.sim import small_job
from tests.sim.automata import Alone, Frame
from tests.sim.cluster import Scenario, truth_of
from tests.sim.exhaustive import Search, explore
from tests.sim.plants import PLANTS
from tests.sim.reduction import Reduction
from tests.sim.small_job import Rules
from tests.sim.symbols import Lane

PLANTED = {
    "VotesWithoutBackups": "leaves shard 0 with fewer holders",
    "LetsGoBeforeVerified": "cannot make shard 0",
    "HandsOutTwice": r"run 0 is handed out to \['m0', 'm1'\]",
    "DropsNewGenerations": "stuck: m0, m1 wait for ever",
    "FoldsInArrivalOrder": "differs from the undisturbed job",
    "CountsWhatItChecks": "StopIteration",
}
"""Planted bug -> what it breaks; 50 to 1000 states away."""


def _small(members: int, faults: int) -> Scenario:
    return Scenario(members=members, runs=2, crashes=faults, backups=1, steps=1, small=True)


@pytest.mark.parametrize(("faults", "states_min"), [(0, 100), (1, 1000)])
def test_two_members_come_to_the_same_end_in_every_order_and_with_a_death_at_any_point(
    faults: int, states_min: int
) -> None:
    found = explore(_small(2, faults), at_once=True)
    assert found.is_whole, found.violation
    assert set(found.outcomes) == {"ok"}
    assert found.states > states_min


@pytest.mark.on_demand
def test_three_members_come_to_the_same_end_in_every_order_and_with_a_death_at_any_point() -> None:
    found = explore(_small(3, 1), at_once=True, reduced=True)
    assert found.is_whole, found.violation
    assert set(found.outcomes) == {"ok"}
    assert (found.leads_back, found.minded) == (False, 0)


@pytest.mark.parametrize(("members", "faults"), [(2, 0), (2, 1), (3, 0)])
def test_of_schedules_that_come_to_the_same_one_is_enough(members: int, faults: int) -> None:
    """The same ends, and each member in the same states, as where all orders are looked at."""
    reached = []
    for reduced in [False, True] if members == 2 else [True]:
        rules = Rules(_small(members, faults), at_once=True)
        search = Search(rules, Reduction(rules) if reduced else None)
        found = search.run(10**9, lambda line: None)
        assert found.is_whole, found.violation
        names = [{number: digest for digest, number in each._numbers.items()} for each in rules.automata]
        ends = {
            (*(name[state] for name, state in zip(names, job.states, strict=True)), job.lives) for job in search.ends
        }
        reached.append((ends, [set(name.values()) for name in names]))
    assert (found.leads_back, found.minded) == (False, 0)
    if members == 2:
        assert reached[0] == reached[1]
    else:  # all orders are 152,722 states
        assert (found.ends, found.member_states, found.states < 3000) == (162, 145, True)


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_bug_is_found_where_one_of_the_schedules_that_come_to_the_same_is_looked_at(planted: str) -> None:
    with PLANTS[planted].patch():
        found = explore(_small(2, faults=1), at_once=True, limit=1000, reduced=True)
    assert re.search(PLANTED[planted], found.violation)


@pytest.mark.on_demand
@pytest.mark.parametrize("planted", sorted(PLANTS))
def test_a_planted_bug_is_found_in_few_orders_as_in_all(planted: str) -> None:
    truth = truth_of(Scenario(members=1, steps=1, runs=2, small=True))  # not even a job of one comes through some
    found = []
    with PLANTS[planted].patch(), patch.object(small_job, "truth_of", lambda scenario: truth):
        for reduced in (False, True):
            found.append(explore(_small(2, 1), at_once=True, limit=20_000, reduced=reduced).violation != "")
    assert found[0] == found[1]


@pytest.mark.parametrize("planted", PLANTED)
def test_the_shortest_schedule_of_a_planted_bug_is_found(planted: str) -> None:
    with PLANTS[planted].patch():
        found = explore(_small(2, faults=1), at_once=True, limit=1000)
    assert re.search(PLANTED[planted], found.violation)
    assert 2 < len(found.schedule) < 20


def test_memory_that_is_written_before_others_have_read_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one member reads lies in another one's automaton."""
    real = Alone._frames

    def zero_what_was_sent(member: Alone) -> tuple[Frame, ...]:
        frames = real(member)
        for lane in [each for places in member.given.values() for each in places if isinstance(each, Lane)]:
            lane.slot.zero()
        return frames

    monkeypatch.setattr(Alone, "_frames", zero_what_was_sent)
    found = explore(_small(2, faults=0), at_once=True, limit=1000)
    assert "was released or overwritten before it was read" in found.violation
