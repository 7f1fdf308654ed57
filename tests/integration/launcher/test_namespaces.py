"""Nodes with addresses of their own and nothing but TCP between them: what their network does to them, bit for bit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from elastrain.launcher.namespaces.switch import lacking
from tests.support.network_harness import NODES, Network, netns_job
from tests.support.training import assert_equal_to_undisturbed
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(lacking() is not None, reason=str(lacking()))]
ARGUMENTS = ("--steps", "28", "--backups", "1")


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_members_of_three_nodes_talk_over_tcp_alone_and_go_on_when_a_node_is_killed(tmp_path: Path) -> None:
    with netns_job(tmp_path, "--max-restarts", "0", arguments=ARGUMENTS) as job:
        job.wait_step(3)
        generation = job.wait_members(*NODES, after=0)
        network = Network(job)
        worker = job.events("worker_start", source="agent:node0")[0]["pid"]
        own, *others = (network.switch.address(node) for node in NODES)
        assert set(others) <= {peer for here, peer in network.connections(worker) if here == own}
        job.kill_node("node1")
        job.wait_members("node0", "node2", after=generation)
        assert_equal_to_undisturbed(job.finish(), *ARGUMENTS)
        job.assert_nothing_left()
        assert network.switch.namespace("") not in namespaces()


def test_node_cut_off_parks_while_the_others_go_on_and_joins_anew_when_the_network_is_mended(tmp_path: Path) -> None:
    with netns_job(tmp_path, arguments=ARGUMENTS) as job:
        job.wait_step(3)
        generation = job.wait_members(*NODES, after=0)
        network = Network(job)
        network.cut("node2")
        job.wait("view", source="agent:node0", generation=generation + 1)
        for node in ("node0", "node1"):
            job.wait("link", source="agent:node2", node=node, up=False)
        parked = job.wait("parked", source="agent:node2")
        assert "the others are no strict majority" in parked["reason"] or "store does not answer" in parked["reason"]
        # Nobody can tell it: it has taken no other view, and still waits.
        assert [e["generation"] for e in job.events("view", source="agent:node2")] == [generation]
        step = job.status()["step"]
        job.wait_step(step + 3)
        network.impair()
        job.wait_members(*NODES, after=generation + 1)
        assert_equal_to_undisturbed(job.finish(), *ARGUMENTS)
        job.assert_nothing_left()


def test_killed_launcher_leaves_no_namespace(tmp_path: Path) -> None:
    with netns_job(tmp_path, arguments=ARGUMENTS) as job:
        job.wait_step(1)
        prefix = Network(job).switch.namespace("")
        assert namespaces().count(prefix) == 4
        job.process.kill()
        until(lambda: prefix not in namespaces(), 40, "the end of all namespaces")
        job.assert_nothing_left()
