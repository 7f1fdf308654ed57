"""Members that compute runs of each other's a second time: a gradient that one of them got wrong is never committed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain import protocol as p
from elastrain.job.values import AuditPlan
from tests.sim.cluster import Scenario
from tests.sim.plants import Slipping
from tests.sim.scenarios import _truth, draw

SEEDS = 8


def slipping(seed: int, **changes: object) -> Slipping:
    """The job of this seed without any other fault; every run of it is audited."""
    scenario = quiet(draw(seed))
    scenario = replace(scenario, **changes)  # type: ignore[arg-type]
    return Slipping(scenario, seed, _truth(scenario.steps, scenario.runs, scenario.backups))


def quiet(drawn: Scenario) -> Scenario:
    return replace(drawn, crashes=0, zombies=0, isolated=False, hunts=0, pairs=0, flips=0, drifts=0, stops=0)


@pytest.mark.parametrize("members", [2, 3, 5])
def test_a_slip_is_named_and_computed_anew_and_the_parameters_are_those_of_the_undisturbed_job(members: int) -> None:
    named = struck = 0
    for seed in range(SEEDS):
        # What a drive has spoilt is computed again and compared with nothing, were it a slip or not.
        cluster = slipping(seed, members=members, slips=1, joins=0, unread=0)
        cluster.run()
        assert cluster.outcome == "ok", f"seed {seed}: {cluster.diverged or cluster.lost}"
        used = {m for m in cluster.slipped if not cluster.members[m].slips}
        assert set(cluster.accused) <= used, f"seed {seed}"
        assert not cluster.dead, f"seed {seed}: nobody leaves after one fault"
        named += bool(cluster.accused)
        struck += bool(used)
    assert named == struck >= SEEDS // 2


@pytest.mark.parametrize("members", [3, 5])
def test_who_is_wrong_again_and_again_leaves_and_the_job_goes_on(members: int) -> None:
    left = 0
    for seed in range(SEEDS):
        cluster = slipping(seed, members=members, slips=3, joins=1, backups=2)
        cluster.slips_at_once = 1000
        cluster.run()
        assert cluster.outcome == "ok", f"seed {seed}: {cluster.diverged or cluster.lost}"
        assert cluster.dead <= cluster.slipped, f"seed {seed}"
        left += bool(cluster.dead)
    assert left >= SEEDS // 2


def test_audits_among_losses_and_joins_never_stop_the_job_nor_accuse_the_wrong_one() -> None:
    for seed in range(3 * SEEDS):
        drawn = replace(draw(seed), drifts=0, flips=0)
        scenario = replace(drawn, audit=AuditPlan(every=1, is_of_all=seed % 2 == 0, seed=seed), slips=seed % 3)
        cluster = Slipping(scenario, seed, _truth(scenario.steps, scenario.runs, scenario.backups), is_strict=False)
        cluster.run()
        assert cluster.outcome != "diverged", f"seed {seed}: {cluster.diverged}"
        assert set(cluster.accused) <= cluster.slipped, f"seed {seed}"


def test_one_run_in_every_so_many_steps_and_each_by_another_member() -> None:
    scenario = replace(quiet(draw(0)), members=3, joins=0, steps=6, runs=5, check_every=0, resumes=None, small=False)
    scenario = replace(scenario, audit=AuditPlan(every=2, seed=4), checkpoint_every=0, stalls=0, unread=0)
    cluster = Slipping(scenario, 0, _truth(6, 5, scenario.backups))
    cluster.run()
    assert sorted({step for _, step, _ in cluster.audited}) == [0, 2, 4]
    assert len(cluster.audited) == 3
    assert all((name, step, run) not in cluster.computed for name, step, run in cluster.audited)
    assert isinstance(cluster.audited[0][2], int)
    assert p.Recompute(step=0, run=0).whole is False, "the check of the first step is of one micro-batch"
