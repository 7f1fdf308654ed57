"""Members whose loops get their next run while a device still works on the present one, among losses and restarts."""

from __future__ import annotations

import os
from collections import Counter
from unittest.mock import patch

import pytest

from elastrain.member.state.runs import Runs
from tests.sim import test_pipelined_members as pipelined
from tests.sim.cluster import Cluster, Scenario
from tests.sim.device_plants import OnDevice, SlippedOnDevice
from tests.sim.member import Violation
from tests.sim.scenarios import cluster_of

SCHEDULES = int(os.environ.get("ELASTRAIN_SIM_DEVICES", "160"))


class Watched(OnDevice):
    """A job that counts how many computations its members have outstanding when they get another one."""

    counted: Counter[int]

    def _compute(self, name: str, run: object) -> None:
        self.counted[len(self.members[name].given)] += 1
        super()._compute(name, run)  # type: ignore[arg-type]


def in_pipelines(seed: int, make: type[Cluster], scenario: Scenario | None = None) -> Cluster:
    """The job of this seed in pipelines, on devices."""
    alone = pipelined.cluster_of(seed, scenario)
    return make(alone.scenario, seed, alone.truth)


def test_every_schedule_ends_as_the_undisturbed_job_or_says_why_not() -> None:
    ended, given = Counter[str](), Counter[int]()
    for seed in range(SCHEDULES):
        cluster = cluster_of(seed, Watched)
        assert isinstance(cluster, Watched)
        cluster.counted = given
        try:
            cluster.run()
        except Exception as error:  # noqa: BLE001  the seed has to be named whatever went wrong
            pytest.fail(f"seed {seed} ({cluster.scenario}): {type(error).__name__}: {error}", pytrace=False)
        ended[cluster.outcome] += 1
    assert ended["ok"] > SCHEDULES // 2
    assert given[2] > SCHEDULES, "a second run was given while the first one landed"


def test_a_step_that_begins_anew_counts_nothing_of_what_was_outstanding() -> None:
    for seed in range(SCHEDULES // 10):
        cluster = cluster_of(seed, SlippedOnDevice)
        cluster.run()
        assert cluster.outcome == "ok", f"seed {seed}: {cluster.diverged or cluster.lost}"


def test_loops_of_pipelines_get_their_next_action_while_the_present_one_lands() -> None:
    given = Counter[int]()
    for seed in range(SCHEDULES // 2):
        cluster = in_pipelines(seed, Watched)
        assert isinstance(cluster, Watched)
        cluster.counted = given
        cluster.run()
        assert cluster.outcome == "ok" or cluster.scenario.crashes, f"seed {seed}"
    assert given[2] > SCHEDULES


@pytest.mark.parametrize("kind", sorted(pipelined.OTHERS))
def test_the_same_among_other_faults(kind: str) -> None:
    for seed in range(SCHEDULES // 20):
        scenario = pipelined.OTHERS[kind](pipelined.draw(seed))
        cluster = in_pipelines(seed, OnDevice, scenario)
        cluster.run()


def test_an_action_that_is_given_again_while_it_lands_is_found() -> None:
    with patch.object(Runs, "actions", []), pytest.raises(Violation, match="again before it has landed"):
        in_pipelines(0, OnDevice).run(limit=5_000)
