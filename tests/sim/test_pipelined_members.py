"""Members that compute in pipelines, with losses, joins and zombies: every step has the digest of a job of one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

from elastrain.job.values import Report
from elastrain.member.job_end import JobEnd
from elastrain.member.pipeline.replicas import Replicas
from elastrain.pipeline.planner import step_profile
from tests.sim.checks import Truth, Violation
from tests.sim.cluster import Cluster, Scenario, truth_of

SEEDS = 300
PLANNED = 40


@cache
def _truth(steps: int, runs: int, length: int, backups: int) -> Truth:
    """The undisturbed job of one, without pipelines."""
    return truth_of(Scenario(steps=steps, runs=runs, run_length=length, backups=backups))


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


def cluster_of(seed: int, scenario: Scenario | None = None) -> Cluster:
    scenario = scenario or draw(seed)
    return Cluster(scenario, seed, _truth(scenario.steps, scenario.runs, scenario.run_length, scenario.backups))


def _quiet(size: Scenario) -> Scenario:
    return replace(size, members=max(2, size.members), crashes=0, zombies=0, isolated=0, early=False)


def plans_of(seed: int, **more: Any) -> Cluster:
    """A job whose first members are answered with any plans. It is long enough that each is in force for a while."""
    size = replace(draw(seed), members=max(2, draw(seed).members), steps=8, plans=True, **more)
    return cluster_of(seed, size)


OTHERS: dict[str, Callable[[Scenario], Scenario]] = {
    "bits flip": lambda size: replace(_quiet(size), flips=2),
    "starts from a checkpoint": lambda size: replace(size, resumes=0),
    "loops stand still": lambda size: replace(size, stalls=2, slow_behind=True),
    "loops are left early": lambda size: replace(size, members=max(3, size.members), stops=1 + size.runs % 2),
    "checkpoints": lambda size: replace(size, checkpoint_every=1, local_disks=bool(size.joins), wishes=1),
    "two die at once": lambda size: replace(size, members=max(3, size.members), backups=2, pairs=2, crashes=0),
    "holders are hunted": lambda size: replace(_quiet(size), members=max(3, size.members), hunts=3),
    "limits leave no room": lambda size: replace(size, members=max(3, size.members), narrow=0.6),
    "settings drift apart": lambda size: replace(_quiet(size), drifts=1),
}


@pytest.mark.parametrize("chunk", range(4))
def test_every_step_has_the_digest_of_a_job_of_one(chunk: int) -> None:
    for seed in range(chunk * SEEDS // 4, (chunk + 1) * SEEDS // 4):
        cluster_of(seed).run()


@pytest.mark.parametrize("kind", OTHERS)
def test_whatever_else_happens_the_digest_stays(kind: str) -> None:
    for seed in range(500, 508):
        cluster_of(seed, OTHERS[kind](draw(seed))).run()


@pytest.mark.parametrize("chunk", range(4))
def test_whatever_the_planner_answers_the_digest_stays(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "WINDOW", 1)
    plans = 0
    for seed in range(30_000 + chunk * PLANNED // 4, 30_000 + (chunk + 1) * PLANNED // 4):
        cluster = plans_of(seed)
        cluster.run()
        plans += len({record.plan for record in cluster.checks.records.values()})
    assert plans > PLANNED // 2, "most jobs change their plan"


def test_a_verdict_that_ends_a_loop_needs_no_other_event() -> None:
    # Two of three leave their loops, and the third waits for an activation of theirs: nothing comes any more.
    cluster_of(19, replace(draw(19), members=max(3, draw(19).members), stops=2)).run()


def test_a_plan_that_only_newcomers_know_is_made_anew() -> None:
    # All who have traced die before the first commit. A newcomer has heard of their plan, and no task can be by it.
    cluster_of(890, replace(draw(890), members=3, crashes=3)).run()


@pytest.mark.parametrize("seed", [20014, 20357])
def test_what_has_gone_from_memory_is_lacking_when_it_is_wanted_again(seed: int) -> None:
    # A member learns of a commit by a recovery, lets go of a block, and is given it again by the next recovery.
    size = draw(seed)
    cluster_of(seed, replace(size, crashes=size.members, joins=2, early=seed % 2 == 0)).run()


def test_rank_0_that_keeps_its_own_blocks_is_found() -> None:
    def run_some() -> None:
        for seed in range(500, 540):
            cluster_of(seed, OTHERS["limits leave no room"](draw(seed))).run(limit=6_000)

    keeps_own = property(lambda end: not end.has_room_for_all)
    with patch.object(JobEnd, "keeps_own", keeps_own), pytest.raises(Violation, match="leaves without all parameters"):
        run_some()


def test_a_recovery_after_which_members_without_room_take_all_blocks_is_found() -> None:
    recover = Replicas.recover

    def takes_all(own: Replicas, reports: Mapping[str, Report], *of: Any) -> None:
        recover(own, {member: replace(report, keeps_own=False) for member, report in reports.items()}, *of)

    size = OTHERS["limits leave no room"](replace(draw(1558), crashes=3, early=False))
    with patch.object(Replicas, "recover", takes_all), pytest.raises(Violation, match="without room for them"):
        cluster_of(1558, size).run()
