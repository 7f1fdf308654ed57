"""Members without room for copies: no vote waits for them, no present holder goes for them, and the digest stays."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from elastrain.job.placement import Holders
from elastrain.member.shards.copies import CopiesGiven
from elastrain.member.state import committed
from elastrain.protocol.messages import Copied
from tests.sim.cluster import Cluster
from tests.sim.scenarios import cluster_of as plain_cluster_of
from tests.sim.test_pipelined_members import cluster_of, draw

WITHIN = 60
"""Schedules that break a rule at the latest."""


def refusing(seed: int) -> Cluster:
    size, share = draw(seed), 0.5 if seed % 3 else 1.0
    members, faults = max(3, size.members), {"crashes": 1 + seed % 2, "backups": 1 + seed % 2}
    return cluster_of(seed, replace(size, members=members, steps=6, refuses=share, **faults))


@pytest.mark.parametrize("chunk", range(2))
def test_whatever_has_no_room_the_digest_stays(chunk: int) -> None:
    refused = 0
    for seed in range(90_000 + 40 * chunk, 90_000 + 40 * (chunk + 1)):
        cluster = refusing(seed)
        cluster.run()
        refused += sum(member.refused_copies for member in cluster.members.values())
    assert refused > 40, "many copies have no room"


def a_refused_copy_is_waited_for() -> AbstractContextManager[Any]:
    return patch.object(CopiesGiven, "_refuse", lambda own, member, shards: None)


def a_refused_copy_counts_as_taken() -> AbstractContextManager[Any]:
    rule = CopiesGiven.on_copied

    def takes(own: CopiesGiven, source: str, message: Copied) -> None:
        rule(own, source, replace(message, refused=()))

    return patch.object(CopiesGiven, "on_copied", takes)


def holders_go_for_members_without_room() -> AbstractContextManager[Any]:
    def without(now: Holders, goal: Holders, refused: Collection[str]) -> Holders:
        return Holders(goal.primary, tuple(m for m in goal.backups if m not in refused))

    return patch.object(committed, "with_refusals", without)


PLANTS: list[Callable[[], AbstractContextManager[Any]]] = [
    a_refused_copy_is_waited_for,
    a_refused_copy_counts_as_taken,
    holders_go_for_members_without_room,
]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_broken_rules_are_found(plant: Callable[[], AbstractContextManager[Any]]) -> None:
    def fails(seed: int) -> bool:
        cluster = refusing(seed)
        try:
            with plant():
                cluster.run(limit=5_000)
        except (AssertionError, KeyError, IndexError, StopIteration, ValueError):
            return True
        return False

    assert any(fails(90_000 + seed) for seed in range(WITHIN)), f"not found in {WITHIN} schedules"


def test_members_that_compute_whole_runs_may_refuse_copies_too() -> None:
    for seed in range(400, 430):
        cluster = plain_cluster_of(seed)
        size = replace(cluster.scenario, members=max(3, cluster.scenario.members), refuses=0.6)
        Cluster(size, seed, cluster.truth).run()
