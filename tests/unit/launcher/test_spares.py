"""Spare nodes wait until a place is free, and take it in the order of their start; a quarantined node starts none."""

from __future__ import annotations

import pytest

from elastrain.errors import ConfigError
from elastrain.launcher.cli.options.node_options import RendezvousFlags, SizeFlags, quarantine_rule
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.core.places.quarantine import duration, quarantined
from elastrain.launcher.shared.job_values import Life, Log, Start
from elastrain.launcher.shared.places import QuarantineRule
from tests.unit.launcher.test_nodes import ALL, RING, Agent, Cluster, a_pair, views_of


def with_spares(*names: str, **config: object) -> Cluster:
    """Three nodes that have committed a step, and spares."""
    cluster = Cluster()
    for name in ("node0", "node1", "node2", *names):
        cluster.add(name, spares=len(names), **config)
    cluster.hello(*ALL)
    cluster.commit(0, *ALL, holders=RING)
    return cluster


def come_in(cluster: Cluster, member: str, *others: str) -> None:
    """The member of a spare joins and commits a step, and every member then holds everything."""
    cluster.hello(member)
    cluster.commit(1, member, *others, holders=dict.fromkeys("012", (member, *others)))


def started(agent: Agent) -> list[str]:
    return [command.member for command in agent.done if isinstance(command, Start)]


def test_a_node_beyond_max_waits_and_says_so_and_one_beyond_the_spares_is_refused() -> None:
    cluster = with_spares("spare0")
    spare = cluster.agents["spare0"]
    assert not started(spare) and spare.end is None
    assert spare.logged("spare_waits")[0].say == (
        "spare0 waits as a spare: the job has all its 3 nodes (node0, node1, node2)"
    )
    too_many = cluster.add("more", spares=1)
    assert too_many.end is not None and too_many.end.code == 1
    assert "all its 3 nodes and its spares, 1 at most" in too_many.end.sentence


def test_a_spare_takes_the_place_of_a_killed_node_before_its_lease_ends() -> None:
    cluster = with_spares("spare0")
    spare = cluster.agents["spare0"]
    cluster.kill_node("node1")
    assert started(spare) == ["m3"]
    assert spare.logged("spare_begins")[0].say == "the spare spare0 takes the place of node1: its workers start"
    cluster.hello("m3")
    cluster.lease_goes("node1")
    assert views_of(cluster) == {("m0", "m2", "m3")}


def test_a_spare_does_not_begin_for_a_node_that_is_only_silent_to_itself() -> None:
    cluster = with_spares("spare0")
    cluster.cut_off("spare0")
    assert not started(cluster.agents["spare0"]) and views_of(cluster) == {ALL}


def test_two_spares_take_one_place_each_in_the_order_of_their_start() -> None:
    cluster = with_spares("second", "third")
    cluster.kill_node("node2")
    assert (started(cluster.agents["second"]), started(cluster.agents["third"])) == (["m3"], [])
    come_in(cluster, "m3", "m0", "m1")
    cluster.kill_node("node1")
    assert started(cluster.agents["third"]) == ["m4"]


def test_a_spare_begins_when_a_node_begins_to_hand_over() -> None:
    cluster = with_spares("spare0")
    cluster.happen(cluster.agents["node1"], ev.StopAsked(code=143, sentence="stopped by SIGTERM"))
    cluster.answer()
    assert started(cluster.agents["spare0"]) == ["m3"]


def test_a_killed_node_that_comes_back_waits_once_its_place_is_taken() -> None:
    cluster = with_spares("spare0")
    cluster.kill_node("node1")
    cluster.lease_goes("node1")
    come_in(cluster, "m3", "m0", "m2")
    back = cluster.add("node1", spares=1)
    assert not started(back) and back.core.cluster.peers.record.spare
    cluster.kill_node("node0")
    assert started(back) == ["m4"]


def test_a_spare_ends_well_with_the_job() -> None:
    cluster = with_spares("spare0")
    for member in ALL:
        cluster.say(member, finished(member))
    for member in ALL:
        cluster.die(member, 0)
    end = cluster.agents["spare0"].end
    assert end is not None and (end.code, end.sentence) == (0, "finished")


def test_a_spare_whose_member_has_finished_ends_like_any_other_node() -> None:
    cluster = with_spares("spare0")
    cluster.kill_node("node1")
    cluster.lease_goes("node1")
    come_in(cluster, "m3", "m0", "m2")
    for member in ("m0", "m2", "m3"):
        cluster.say(member, finished(member))
    for member in ("m0", "m2", "m3"):
        cluster.die(member, 0)
    ends = [agent.end for agent in cluster.agents.values() if agent.name != "node1"]
    assert {(end.code, end.sentence) for end in ends if end is not None} == {(0, "finished after step 1")}


def finished(member: str) -> object:
    from elastrain.protocol.agent_messages import Finished

    return Finished(step=1, digest="same")


def test_a_node_that_lost_three_workers_in_an_hour_gets_no_more_and_says_so() -> None:
    cluster = a_pair(quarantine=QuarantineRule(losses=3, within_s=3600.0))
    node, at_s = cluster.agents["node1"], (10.0, 20.0, 3000.0)
    for number, member in enumerate(("m1", "m2", "m3")):
        cluster.now += at_s[number]
        cluster.die(member)
        if number < 2:
            cluster.hello(f"m{number + 2}")
            cluster.commit(number + 1, "m0", f"m{number + 2}", holders={"0": ("m0", f"m{number + 2}")})
    said = [c.say for c in node.done if isinstance(c, Log) and c.event == "no_restart"]
    reason = "node1 is quarantined and gets no more workers: 3 workers were lost within 1 h (--quarantine)"
    assert said == [f"m3 ended by SIGKILL; not started again: {reason}"]
    assert node.end is not None and node.end.sentence == f"{reason}; 1 elsewhere go on"
    assert cluster.agents["node0"].end is None


def test_losses_of_earlier_lives_count_and_old_ones_do_not() -> None:
    rule = QuarantineRule(losses=2, within_s=60.0)
    cluster = a_pair(quarantine=rule, life=Life(number=2, losses_s=(990.0,)))
    cluster.die("m1")
    assert cluster.agents["node1"].end is not None
    assert not quarantined("node1", [0.0, 61.0, 122.5], rule)
    assert quarantined("node1", [0.0, 61.0, 121.0], rule).startswith("node1 is quarantined")
    assert not quarantined("node1", [0.0, 0.0], None)


@pytest.mark.parametrize(("text", "rule"), [("3/1h", (3, 3600.0)), ("1/90", (1, 90.0)), ("2/0.5m", (2, 30.0))])
def test_a_quarantine_is_read(text: str, rule: tuple[int, float]) -> None:
    read = quarantine_rule(text)
    assert (read.losses, read.within_s) == rule
    assert [duration(seconds) for seconds in (3600.0, 90.0, 120.0, 0.5)] == ["1 h", "90 s", "2 min", "0.5 s"]


@pytest.mark.parametrize("text", ["", "3", "0/1h", "3/0", "3/1w", "-1/1h", "3/99999h", "3/ 1h"])
def test_a_wrong_quarantine_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--quarantine '.*': write N/TIME"):
        quarantine_rule(text)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"nnodes": "3:2"}, "--nnodes 3:2: MIN must be 1 or more, and at most MAX"),
        ({"spares": 1}, "--spares 1 asks for nodes beyond MAX, and this job has one node"),
        ({"standalone": True, "spares": 1}, "leave --nnodes, --spares and --rdzv-endpoint out"),
        ({"local_nodes": 60, "spares": 5}, "at most 64 nodes are simulated here"),
    ],
)
def test_wrong_numbers_of_nodes_are_one_sentence(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        SizeFlags(**flags).size(RendezvousFlags())  # type: ignore[arg-type]
