"""How several nodes end a job together: after an exception in a loop, and without members of their own."""

from __future__ import annotations

from elastrain.launcher.core import agent_events as ev
from elastrain.protocol.agent_messages import Finished, Progress
from tests.unit.launcher.test_nodes import Cluster, running


def finish(cluster: Cluster, member: str, *, raised: bool = False, exit_code: int = 0) -> None:
    cluster.say(member, Finished(step=9, digest="d", raised=raised))
    cluster.happen(agent := cluster.of(member), ev.WorkerDied(member=member, source="pidfd", at_s=cluster.now))
    cluster.happen(agent, ev.WorkerExited(member=member, exit_code=exit_code))
    cluster.answer()


def test_no_node_ends_with_0_where_an_exception_has_ended_the_loop_of_another() -> None:
    """It did where it had heard of its digest and not yet of its exit code."""
    cluster = running()
    cluster.say("m1", Finished(step=9, digest="d", raised=True))
    finish(cluster, "m0")
    finish(cluster, "m2")
    assert [agent.end for agent in cluster.living] == [None, None, None]
    finish(cluster, "m1", raised=True, exit_code=1)
    assert [agent.end.code for agent in cluster.living if agent.end] == [1, 1, 1]
    assert {agent.end.sentence for agent in cluster.living if agent.end} == {
        "m1 ended with exit code 1 after an exception in its loop"
    }


def test_an_exception_that_the_script_catches_outside_of_its_loop_does_no_harm() -> None:
    cluster = running()
    finish(cluster, "m0")
    finish(cluster, "m1", raised=True)
    assert cluster.agents["node0"].end is None
    finish(cluster, "m2", raised=True)
    assert [agent.end.code for agent in cluster.living if agent.end] == [0, 0, 0]


def test_a_node_without_members_at_the_end_does_not_say_after_which_step_that_was() -> None:
    """It named the last step of its own member, which had been killed forty steps before the end."""
    cluster = running()
    cluster.say("m1", Progress(step=3))
    cluster.die("m1")
    for member in ("m0", "m2"):
        finish(cluster, member)
    for surplus in [worker.id for worker in cluster.agents["node1"].core.cluster.workers.living]:
        cluster.die(surplus)
    end = cluster.agents["node1"].end
    assert end is not None and (end.code, end.sentence) == (0, "finished")
