"""Clocks of two hosts are compared when they meet, and the node that came later does not begin."""

from __future__ import annotations

import pytest

from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.shared.times import CLOCK_S, wrong_clock
from tests.unit.launcher.test_nodes import Cluster, running

HOUR_S = 3600.0


@pytest.mark.parametrize(("late_s", "words"), [(HOUR_S, "3600 s ahead of"), (-HOUR_S, "3600 s behind")])
def test_a_clock_that_is_wrong_by_an_hour_is_one_sentence(late_s: float, words: str) -> None:
    assert wrong_clock(late_s, "node a") == (
        f"the clock of this host is {words} that of node a: set both by NTP, and start again"
    )


@pytest.mark.parametrize("late_s", [0.0, 5.0, -CLOCK_S, CLOCK_S])
def test_small_differences_are_nothing(late_s: float) -> None:
    assert wrong_clock(late_s, "node a") == ""


@pytest.mark.parametrize("late_s", [HOUR_S, -HOUR_S])
def test_the_node_that_came_later_ends_alone_and_the_first_one_waits_for_others(late_s: float) -> None:
    cluster = Cluster()
    first, later = (cluster.add(name, nodes_min=3, nodes_max=3) for name in ("node0", "node1"))
    cluster.happen(first, ev.ClockHeard(node="node1", late_s=-late_s))
    cluster.happen(later, ev.ClockHeard(node="node0", late_s=late_s))
    assert first.end is None and first.logged("clock")
    assert later.end is not None and (later.end.code, later.end.everywhere) == (1, False)
    assert later.end.sentence == wrong_clock(late_s, "node node0")


def test_a_newcomer_with_a_wrong_clock_does_not_join_a_running_job() -> None:
    cluster = running()
    cluster.kill_node("node2")
    late = cluster.add("node3")
    assert late.end is None
    cluster.happen(late, ev.ClockHeard(node="node0", late_s=HOUR_S))
    assert late.end is not None and "3600 s ahead of" in late.end.sentence


def test_a_clock_that_jumps_under_members_changes_nothing() -> None:
    cluster = running()
    for agent in cluster.agents.values():
        for other in cluster.agents.values():
            cluster.happen(agent, ev.ClockHeard(node=other.name, late_s=400 * 24 * HOUR_S))
    assert all(agent.end is None for agent in cluster.agents.values())
