"""Members that are fast and slow by turns: shares of the runs go by the record, and no step shows who computed what."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from elastrain.decisions.agreed_speeds import agreed_speeds
from elastrain.decisions.recovery import decide
from elastrain.job.run_plan import plan
from elastrain.job.values import AuditPlan, Record, Recovery
from elastrain.member.commit_rules import Committing
from elastrain.member.recovering import Recovering
from elastrain.pipeline.planner import step_profile
from tests.sim.cluster import Cluster, Scenario
from tests.sim.scenarios import _truth, draw

SEEDS = 60
WITHIN = 60
"""Schedules that break a rule at the latest."""


@pytest.fixture(autouse=True)
def every_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members tell the time of each step, so that shares change all the time."""
    monkeypatch.setattr(step_profile, "WINDOW", 1)


def scenario_of(seed: int) -> Scenario:
    size = draw(seed)
    return replace(size, members=max(2, size.members), runs=size.runs + 3, steps=max(6, size.steps), speeds=True)


def cluster_of(size: Scenario, seed: int) -> Cluster:
    return Cluster(size, seed, _truth(size.steps, size.runs, size.backups))


def speeds_of(cluster: Cluster) -> dict[str, int]:
    """Return the speeds in the newest record of a living member."""
    records = [m.machine.commit.record for name, m in cluster.members.items() if name not in cluster.dead]
    return dict(max((r for r in records if r is not None), key=lambda r: r.step).findings.speeds)


@pytest.mark.parametrize("chunk", range(3))
def test_every_step_has_the_digest_of_a_job_of_one(chunk: int) -> None:
    uneven = 0
    for seed in range(chunk * SEEDS // 3, (chunk + 1) * SEEDS // 3):
        cluster = cluster_of(scenario_of(seed), seed)
        cluster.run()
        uneven += not cluster.lost and bool(speeds_of(cluster))
    assert uneven >= SEEDS // 6


@pytest.mark.parametrize(
    "more",
    [{"check_every": 1}, {"audit": AuditPlan(every=1, is_of_all=True)}, {"runs": 2}, {"device": True, "unread": 0}],
    ids=["cross-checks", "audits", "fewer runs than members", "devices"],
)
def test_it_stays_with_other_ways_to_compute(more: dict[str, Any]) -> None:
    for seed in range(600, 606):
        cluster_of(replace(scenario_of(seed), **more), seed).run()


# -------------------------------------------------------------------------------------------------------- planted bugs


def _with(record: Record, speeds: tuple[tuple[str, int], ...]) -> Record:
    return replace(record, findings=replace(record.findings, speeds=speeds))


def shares_change_without_a_record() -> AbstractContextManager[Any]:
    """A member goes by what it has measured itself, and by the last record."""

    def by_its_own(own: Committing) -> None:
        m = own._machine
        vote = m.step.proposals.measures.of_whole_runs()
        took_s = None if vote is None else vote.micro_batch_s
        members, present = m.views.view.ids, m.commit.in_force().speeds
        told_s = dict.fromkeys(members, 1.0) | ({} if took_s is None else {m.me: took_s})
        runs = plan(members, m.shape.runs, agreed_speeds(present, told_s, members, m.shape.runs))
        m.step.runs.hand(runs[m.me])
        m.step.check.plan(runs)
        m.step.audits.plan(runs)

    return patch.object(Committing, "_hand_out_runs", by_its_own)


def shares_of_another_view() -> AbstractContextManager[Any]:
    """A member hands out what is left by the record that it knew before the view changed."""

    def by_its_own(own: Recovering) -> Recovery | None:
        m, before = own._machine, own._machine.commit.record
        speeds = () if before is None else before.findings.speeds
        reports = {
            name: replace(r, record=None if r.record is None else _with(r.record, speeds))
            for name, r in m.views.reports.items()
        }
        found = decide(m.views.view, reports, m.shape)
        right = decide(m.views.view, m.views.reports, m.shape)
        assert isinstance(found, Recovery) and isinstance(right, Recovery)
        return replace(found, record=right.record)

    return patch.object(Recovering, "decide", by_its_own)


def the_shares_of_the_view_before_stay() -> AbstractContextManager[Any]:
    """A member's own copy of the shares is as old as its first record."""
    first: dict[str, Any] = {}

    def as_once(own: Committing) -> None:
        m = own._machine
        speeds = first.setdefault(m.me, m.commit.in_force().speeds)
        m.step.runs.hand(plan(m.views.view.ids, m.shape.runs, speeds)[m.me])

    return patch.object(Committing, "_hand_out_runs", as_once)


@pytest.mark.parametrize(
    "plant", [shares_change_without_a_record, shares_of_another_view, the_shares_of_the_view_before_stay]
)
def test_a_broken_rule_is_found(plant: Callable[[], AbstractContextManager[Any]]) -> None:
    for seed in range(WITHIN):
        size = scenario_of(seed)
        cluster = cluster_of(replace(size, members=max(3, size.members), crashes=1, joins=2, backups=2), seed)
        try:
            with plant():
                cluster.run(limit=6_000)
        except (AssertionError, KeyError, IndexError, StopIteration, ValueError):
            return
    pytest.fail(f"nothing found in {WITHIN} schedules")
