"""Faults of the network and of etcd on real jobs in network namespaces: what each costs, and that no bit differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastrain.launcher.namespaces.switch import lacking
from tests.support.network_harness import NODES, netns_job
from tests.support.nodes_harness import NodesJob
from tests.support.training import assert_equal_to_undisturbed
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(lacking() is not None, reason=str(lacking()))]
ARGUMENTS = ("--steps", "28", "--backups", "1")
LONG = ("--steps", "150", "--backups", "1")


def settle(job: NodesJob) -> None:
    job.wait_step(3)
    job.wait_copied()


def views(job: NodesJob) -> dict[int, list[str]]:
    return {e["generation"]: e["members"] for e in job.events("view")}


def assert_goes_on(job: NodesJob, steps: int = 2) -> None:
    job.wait_step(job.status()["step"] + steps)


def finish(job: NodesJob, *arguments: str) -> None:
    assert_equal_to_undisturbed(job.finish(), *arguments)
    job.assert_nothing_left()


def test_flap_of_half_a_second_changes_no_view(tmp_path: Path) -> None:
    with netns_job(tmp_path, arguments=ARGUMENTS) as job:
        settle(job)
        job.inject("flap --target node:node1")
        job.wait("mended")
        assert_goes_on(job)
        finish(job, *ARGUMENTS)
        assert views(job) == {1: ["m0", "m1", "m2"]}


@pytest.mark.on_demand
@pytest.mark.parametrize("nodes", [2, 3])
def test_switch_that_is_off_for_ten_seconds_parks_everybody_and_costs_no_member(tmp_path: Path, nodes: int) -> None:
    with netns_job(tmp_path, arguments=ARGUMENTS, nodes=nodes) as job:
        settle(job)
        for one in range(nodes):
            for other in range(one):
                job.inject(f"partition --target link:node{one}-node{other} --for 10")
        for node in NODES[:nodes]:
            assert "no strict majority" in job.wait("parked", source=f"agent:{node}")["reason"]
        job.wait("new_links")
        assert_goes_on(job)
        members = [f"m{n}" for n in range(nodes)]
        assert set(map(tuple, views(job).values())) == {tuple(members)}
        assert not job.events("exit")
        finish(job, *ARGUMENTS)


@pytest.mark.on_demand
@pytest.mark.parametrize("how", ["", "--way in", "--way out", "--only peers", "--only peers --way in"])
def test_node_cut_off_in_any_way_leaves_the_majority_going_and_comes_back(tmp_path: Path, how: str) -> None:
    with netns_job(tmp_path, arguments=LONG) as job:
        settle(job)
        job.inject(f"partition --target node:node2 --for 12 {how}")
        job.wait("view", source="agent:node0", members=["m0", "m1"])
        assert_goes_on(job)
        job.wait("mended")
        job.wait_members(*NODES, after=2)
        finish(job, *LONG)


@pytest.mark.on_demand
@pytest.mark.parametrize("way", ["both", "in"])
def test_two_nodes_that_do_not_hear_each_other_lose_one_and_the_job_goes_on(tmp_path: Path, way: str) -> None:
    """Which one, the store decides: each of them has a majority with the third."""
    with netns_job(tmp_path, arguments=LONG) as job:
        settle(job)
        job.inject(f"partition --target link:node1-node2 --way {way} --for 15")
        job.wait("view", generation=2)
        assert_goes_on(job)
        job.wait("mended")
        job.wait_members(*NODES, after=2)
        finish(job, *LONG)


@pytest.mark.on_demand
def test_node_that_reaches_the_others_and_not_etcd_stays_through_a_loss_and_a_join(tmp_path: Path) -> None:
    with netns_job(tmp_path, arguments=LONG) as job:
        settle(job)
        job.inject("partition --target node:node2 --only etcd --for 12")
        job.wait("store_away", source="agent:node2")
        job.inject("kill --target member:m1")
        job.wait("view", source="agent:node2", members=["m0", "m2", "m3"])
        assert_goes_on(job)
        job.wait("store_back", source="agent:node2")
        finish(job, *LONG)
        assert "m2" in views(job)[3]


def test_node_that_has_lost_etcd_lives_for_those_who_do_not_reach_it_while_another_does(tmp_path: Path) -> None:
    """Without backups everybody is needed: whoever takes one for dead ends the job."""
    alone = ("--steps", "28", "--backups", "0")
    with netns_job(tmp_path, arguments=alone) as job:
        job.wait_step(3)
        job.inject("partition --target node:node2 --only etcd --for 14")
        job.inject("partition --target node:node0 --only peers --for 12")
        job.wait("lease_gone", source="agent:node0", node="node2")
        job.wait("mended")
        assert_goes_on(job)
        assert not list(job.events("node_dead"))
        finish(job, *alone)


@pytest.mark.on_demand
@pytest.mark.parametrize("line", ["loss --target node:node1 --percent 10", "slow-link --target node:node1 --rate 2"])
def test_loss_and_slow_links_cost_time_alone(tmp_path: Path, line: str) -> None:
    with netns_job(tmp_path, arguments=ARGUMENTS) as job:
        settle(job)
        job.inject(f"{line} --for 10")
        assert_goes_on(job)
        job.wait("mended")
        finish(job, *ARGUMENTS)
        assert views(job) == {1: ["m0", "m1", "m2"]}


@pytest.mark.on_demand
@pytest.mark.timeout(900)
@pytest.mark.parametrize("line", ["etcd-kill --for 6", "etcd-stop --for 6", "etcd-wipe --for 6", "etcd-compact"])
def test_etcd_that_fails_stops_no_step_and_a_loss_and_a_join_afterwards_are_as_ever(tmp_path: Path, line: str) -> None:
    with netns_job(tmp_path, arguments=LONG) as job:
        settle(job)
        job.inject(line)
        assert_goes_on(job)
        if line != "etcd-compact":
            for node in NODES:
                job.wait("store_back", source=f"agent:{node}")
        job.inject("kill --target member:m1")
        job.wait_members(*NODES, after=2)
        assert_goes_on(job)
        finish(job, *LONG)


@pytest.mark.on_demand
@pytest.mark.timeout(900)
@pytest.mark.parametrize("line", ["etcd-kill --for 12", "etcd-wipe --for 12"])
def test_loss_while_etcd_is_away_parks_says_so_and_goes_on_when_it_is_back(tmp_path: Path, line: str) -> None:
    with netns_job(tmp_path, arguments=LONG) as job:
        settle(job)
        job.inject(line)
        job.wait("store_away", source="agent:node0")
        job.inject("kill --target member:m1")
        assert job.wait("parked", source="agent:node0")["reason"].startswith("m1 lost, and the store does not answer")
        job.wait("unparked", source="agent:node0")
        job.wait_members(*NODES, after=2)
        finish(job, *LONG)


@pytest.mark.on_demand
def test_node_that_stood_still_beyond_its_lease_is_left_out_and_comes_back_as_another_member(tmp_path: Path) -> None:
    with netns_job(tmp_path, arguments=LONG) as job:
        settle(job)
        agent = job.agent("node2")
        job.inject("stop --target node:node2 --for 12")
        job.wait("node_dead", source="agent:node0", node="node2")
        job.wait("view", source="agent:node0", members=["m0", "m1"])
        assert_goes_on(job)
        job.wait_members(*NODES, after=2)
        assert job.agent("node2") == agent
        assert "m2" not in [m["id"] for m in job.status()["members"] if m["rank"] is not None]
        finish(job, *LONG)


@pytest.mark.on_demand
@pytest.mark.timeout(900)
def test_node_that_is_started_again_while_etcd_is_away_waits_for_it(tmp_path: Path) -> None:
    """It gave up after four seconds, and the whole command ended with 1 though the job was well."""
    with netns_job(tmp_path, arguments=LONG) as job:
        settle(job)
        job.inject("partition --target node:node2 --only etcd --for 15")
        job.kill_node("node2")
        job.wait("mended")
        job.wait_members(*NODES, after=2)
        finish(job, *LONG)


@pytest.mark.on_demand
def test_node_that_is_cut_off_for_good_ends_alone_with_a_sentence(tmp_path: Path) -> None:
    with netns_job(tmp_path, "--park-timeout", "8", arguments=ARGUMENTS) as job:
        settle(job)
        job.inject("partition --target node:node2")
        job.wait("view", source="agent:node0", members=["m0", "m1"])
        end = job.wait("end", source="agent:node2")
        assert end["exit_code"] == 1
        assert "parked for 8 s" in end["reason"]
        until(lambda: not job.process.poll(), 1, "the others go on")
        assert job.finish().exit_code == 1, "the highest of the nodes' codes"
        job.assert_nothing_left()
