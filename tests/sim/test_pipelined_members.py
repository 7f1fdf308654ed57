"""Members that compute in pipelines, with losses, joins and zombies: every step has the digest of a job of one."""

from __future__ import annotations

import random
from functools import cache

import pytest

from tests.sim.checks import Truth
from tests.sim.cluster import Cluster, Scenario, truth_of

SEEDS = 120


@cache
def _truth(runs: int, length: int, backups: int) -> Truth:
    """The undisturbed job of one, without pipelines."""
    return truth_of(Scenario(steps=4, runs=runs, run_length=length, backups=backups))


def draw(seed: int) -> Scenario:
    rng = random.Random(f"pipelined {seed}")
    return Scenario(
        members=rng.choice([1, 2, 3, 4, 5, 6]),
        nodes=rng.choice([0, 0, 2]),
        steps=4,
        runs=rng.choice([1, 2, 3, 5, 6]),
        run_length=rng.choice([1, 2, 3]),
        stages=rng.choice([2, 2, 3, 4]),
        backups=rng.choice([1, 1, 2]),
        crashes=rng.choice([0, 1, 1, 2, 3]),
        zombies=rng.choice([0, 0, 0, 1]),
        isolated=rng.choice([0, 0, 0, 1]),
        joins=rng.choice([0, 0, 1, 2]),
        slow=rng.choice([0.0, 0.0, 0.3]),
        early=rng.random() < 0.2,
    )


def cluster_of(seed: int) -> Cluster:
    scenario = draw(seed)
    return Cluster(scenario, seed, _truth(scenario.runs, scenario.run_length, scenario.backups))


@pytest.mark.parametrize("chunk", range(4))
def test_every_step_has_the_digest_of_a_job_of_one(chunk: int) -> None:
    for seed in range(chunk * SEEDS // 4, (chunk + 1) * SEEDS // 4):
        cluster_of(seed).run()
