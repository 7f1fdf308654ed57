"""Seeded schedules of the quorum's decisions. The planted bugs of this page must each be found."""

from __future__ import annotations

import pytest

from elastrain.launcher.core.quorum.founding import FoundingRules
from elastrain.launcher.core.quorum.quorum_members import MembershipRules
from tests.sim.quorum.model import Plant, QuorumError, World, play

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
