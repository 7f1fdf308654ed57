"""A job of many nodes: few propose a change that all see, and each tells a few others of a view."""

from __future__ import annotations

import pytest

from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.core.places import large_jobs as limits
from elastrain.launcher.core.view_changes import OTHERS_FIRST_S
from elastrain.launcher.shared.job_values import Propose, PutRecord, TellNodes
from elastrain.launcher.shared.notices import Stands
from tests.unit.launcher.test_nodes import Cluster, views_of

NODES = 20
MEMBERS = tuple(f"m{number}" for number in range(NODES))


def many(nodes: int = NODES) -> Cluster:
    cluster, members = Cluster(), MEMBERS[:nodes]
    for number in range(nodes):
        cluster.add(f"node{number}", nodes_min=nodes, nodes_max=nodes)
    cluster.hello(*members)
    cluster.commit(0, *members, holders={"0": members[-3:]})
    for agent in cluster.living:
        agent.done.clear()
    return cluster


def proposers(cluster: Cluster) -> list[str]:
    found = [agent.name for agent in cluster.agents.values() if any(isinstance(c, Propose) for c in agent.done)]
    return sorted(found, key=lambda name: int(name.removeprefix("node")))


def test_the_first_nodes_of_the_view_propose_the_loss_that_all_see() -> None:
    cluster = many()
    cluster.kill_node("node9")
    assert proposers(cluster) == ["node0", "node1", "node2"]
    assert views_of(cluster) == {tuple(member for member in MEMBERS if member != "m9")}


def test_every_node_proposes_it_where_the_first_ones_do_not_reach_the_store() -> None:
    cluster = many()
    cluster.far_from_store |= {"node0", "node1", "node2"}
    cluster.kill_node("node9")
    assert views_of(cluster) == {MEMBERS}
    cluster.tick(OTHERS_FIRST_S / 2)
    assert views_of(cluster) == {MEMBERS}
    cluster.tick(OTHERS_FIRST_S)
    assert views_of(cluster) == {tuple(member for member in MEMBERS if member != "m9")}


def test_the_next_living_nodes_propose_it_where_the_first_ones_are_lost_too() -> None:
    cluster = many()
    for name in ("node0", "node1", "node2"):
        cluster.kill_node(name)
    assert views_of(cluster) == {MEMBERS[3:]}


def test_a_change_of_its_own_members_is_proposed_by_every_node_at_once() -> None:
    cluster = many()
    cluster.die("m15")
    assert "node15" in proposers(cluster)
    cluster.hello("m20")
    assert proposers(cluster).count("node15") == 1
    assert all("m20" in members for members in views_of(cluster))


def test_a_small_job_has_no_order_of_proposals() -> None:
    cluster = many(limits.SMALL_NODES)
    cluster.kill_node("node3")
    assert proposers(cluster) == [f"node{number}" for number in range(8) if number != 3]


def test_a_node_outside_the_stores_reach_hears_of_a_view_although_each_node_tells_few() -> None:
    cluster = many()
    cluster.far_from_store.add("node17")
    cluster.kill_node("node9")
    cluster.tick(OTHERS_FIRST_S)
    assert views_of(cluster) == {tuple(member for member in MEMBERS if member != "m9")}
    for agent in cluster.living:
        told = [c.node for c in agent.done if isinstance(c, TellNodes) and isinstance(c.message, Stands)]
        assert None not in told and 0 < len(set(told)) <= 5


@pytest.mark.parametrize("nodes", [limits.SMALL_NODES, NODES])
def test_nobody_asks_about_a_lost_node_that_has_no_member_in_the_view_any_more(nodes: int) -> None:
    cluster = many(nodes)
    cluster.kill_node("node3")
    cluster.lease_goes("node3")
    assert not any(isinstance(c, PutRecord) for agent in cluster.living for c in agent.done)
    assert all("node3" not in agent.core.cluster.peers.nodes for agent in cluster.living)


def test_a_lease_that_ends_before_the_change_of_the_view_leaves_no_question_behind() -> None:
    cluster = many()
    cluster.store_answers = False
    cluster.kill_node("node3")
    cluster.lease_goes("node3")
    cluster.store_answers = True
    cluster.tick(10.0)
    assert views_of(cluster) == {tuple(member for member in MEMBERS if member != "m3")}
    for agent in cluster.living:
        assert agent.core.cluster.peers.record.asks == agent.core.cluster.peers.record.misses == ()


def test_a_silent_node_is_asked_about_also_when_it_has_no_member_in_the_view_any_more() -> None:
    """Its port is not known to be closed: other nodes may reach it."""
    cluster = many(4)
    cluster.cut_off("node0")
    assert "m0" not in cluster.agents["node1"].members
    cluster.happen(cluster.agents["node1"], ev.LeaseEnded(node="node0"))
    asked = [c.record.asks for c in cluster.agents["node1"].done if isinstance(c, PutRecord)]
    assert any("node0" in name for asks in asked for name in asks)
