"""A spare node takes the place of a killed one, and a quarantined node ends, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.nodes_harness import NodesJob

pytestmark = pytest.mark.slow
STEPS = 60


def digests(job: NodesJob) -> set[str]:
    return {event["digest"] for event in job.events("finished")}


def test_a_spare_takes_a_killed_nodes_place_and_the_result_is_that_of_an_undisturbed_job(tmp_path: Path) -> None:
    with NodesJob(tmp_path, arguments=("--steps", str(STEPS)), name="alone") as alone:
        alone.hurry()
        assert alone.process.wait(360) == 0, alone.text()
    options = ("--local-nodes", "2", "--spares", "1", "--max-restarts", "0")
    with NodesJob(tmp_path, *options, arguments=("--steps", str(STEPS))) as job:
        spare = job.wait("spare_waits")["node"]
        job.wait_step(2)
        job.wait_copied()
        assert not job.events("worker_start", source=f"agent:{spare}")
        state = job.status()
        assert {member["node"] for member in state["members"]} == {"node0", "node1", "node2"} - {spare}
        assert {node["state"] for node in state["nodes"] if node["node"] == spare} <= {"spare", "spare here"}
        lost = next(name for name in ("node1", "node0") if name != spare)
        other = next(name for name in ("node0", "node1", "node2") if name not in (spare, lost))
        job.kill_node(lost)
        job.wait("spare_begins", node=spare, lost=[lost])
        job.wait_members(*sorted((other, spare)), after=int(state["generation"]))
        job.wait_copied()
        job.hurry()
        job.process.wait(360)
        said = job.text()
        assert f"the spare {spare} takes the place of {lost}: its workers start" in said
        assert digests(job) == digests(alone) and len(digests(job)) == 1, said
        assert job.status()["steps_lost"] == 0


def test_a_node_that_loses_two_workers_is_quarantined_and_the_spare_goes_on_in_its_place(tmp_path: Path) -> None:
    options = ("--local-nodes", "2", "--spares", "1", "--quarantine", "2/1h")
    with NodesJob(tmp_path, *options, arguments=("--steps", "100000")) as job:
        spare = job.wait("spare_waits")["node"]
        job.wait_step(2)
        job.wait_copied()
        node = next(member["node"] for member in job.status()["members"] if member["rank"] == 1)
        other = next(name for name in ("node0", "node1", "node2") if name not in (spare, node))
        for _ in range(2):
            job.wait_copied()
            state = job.status()
            generation = int(state["generation"])
            member = next(m["id"] for m in state["members"] if m["node"] == node and m["rank"] is not None)
            job.kill(member)
            job.wait("exit", member=member)
            if not job.events("no_restart"):
                job.wait_members(*sorted((other, node)), after=generation)
        job.wait("spare_begins", node=spare)
        job.wait_members(*sorted((other, spare)), after=generation)
        assert f"{node} is quarantined and gets no more workers: 2 workers were lost within 1 h" in job.text()
