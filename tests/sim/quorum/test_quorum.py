"""Seeded schedules of the quorum's decisions. The planted bugs of this page must each be found."""

from __future__ import annotations

import pytest

from elastrain.launcher.core.quorum.founding import FoundingRules
from elastrain.launcher.core.quorum.quorum_members import MembershipRules, QuorumDecision
from tests.sim.agents import Violation, outcome
from tests.sim.quorum import model
from tests.sim.quorum.model import Plant, QuorumError, World, play
from tests.sim.quorum.with_agents import AgentsOverQuorum

SEEDS = 150


def _first_found(plant: Plant, named: int = 3) -> str:
    for seed in range(SEEDS):
        try:
            play(World(seed, named=named, plant=plant))
        except QuorumError as wrong:
            return str(wrong)
    return ""


@pytest.mark.parametrize("block", range(4))
def test_any_one_host_is_lost_or_cut_off_and_the_quorum_is_whole_again(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        world = World(seed, spare=seed % 3)
        try:
            play(world)
        except QuorumError as wrong:
            pytest.fail(f"seed {seed}: {wrong}\n" + "\n".join(world.told[-30:]))


def test_two_members_added_at_once_are_found() -> None:
    plant = Plant(membership=MembershipRules(one_at_a_time=False), etcd_takes_two_learners=True)
    assert "at once" in _first_found(plant)


def test_removal_of_a_member_that_is_needed_is_found() -> None:
    assert "was removed" in _first_found(Plant(membership=MembershipRules(keeps_needed=False)))


def test_data_of_an_older_life_taken_for_this_one_is_found() -> None:
    assert "older life" in _first_found(Plant(founding=FoundingRules(compares_instances=False)))


@pytest.mark.parametrize("block", range(2))
def test_agents_and_members_go_on_when_one_host_after_the_other_is_lost(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        world = AgentsOverQuorum(seed)
        try:
            world.run()
        except (Violation, QuorumError) as wrong:
            pytest.fail(f"seed {seed}: {wrong}\n" + "\n".join([*world.quorum.told[-20:], *world.log[-20:]]))
        assert outcome(world) == "goes on", (seed, world.log[-20:])
        assert sum("is killed" in line for line in world.log) >= 1


def test_member_that_is_never_replaced_is_found_by_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = QuorumDecision(action=None, reason="planted")
    monkeypatch.setattr(model, "decide", lambda observed: nothing)
    with pytest.raises((QuorumError, Violation)):
        _run_agents(range(20))


def _run_agents(seeds: range) -> None:
    for seed in seeds:
        AgentsOverQuorum(seed).run()
