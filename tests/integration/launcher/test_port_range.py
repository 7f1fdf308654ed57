"""With `--port-range`, a job of nodes with networks of their own listens at no other port."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastrain.launcher.namespaces.switch import lacking
from tests.support.nodes_harness import NodesJob
from tests.support.quorum_harness import quorum_hosts
from tests.support.training import SCRIPT

pytestmark = pytest.mark.slow
FIRST, LAST = 41000, 41099


def listening(pid: int) -> set[int]:
    """Ports at which any process listens in the network namespace of this one."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                found.add(int(local.rpartition(":")[2], 16))
    return found


@pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
def test_agents_members_and_etcd_listen_within_the_range(tmp_path: Path) -> None:
    options = ("--local-nodes", "2", "--netns", "--port-range", f"{FIRST}-{LAST}")
    with NodesJob(tmp_path, *options, arguments=("--steps", "100000")) as job:
        job.wait_step(1)
        for node in ("node0", "node1"):
            ports = listening(job.agent(node))
            assert len(ports) >= 2, "of the agent and of its member"
            assert all(FIRST <= port <= LAST for port in ports), ports
        etcd = listening(job.etcd())
        assert etcd and all(FIRST <= port <= LAST for port in etcd), etcd


@pytest.mark.timeout(900)
@pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
def test_the_quorum_of_a_job_listens_within_the_range_too(tmp_path: Path) -> None:
    with quorum_hosts(tmp_path, "h0", "h1") as hosts:
        options = ("--nnodes", "2", "--port-range", f"{FIRST}-{LAST}")
        jobs = {host: hosts.start(host, *options, arguments=("--steps", "100000")) for host in ("h0", "h1")}
        for host, job in jobs.items():
            job.wait_step(1, timeout_s=150)
            ports = listening(job.agent(host))
            assert {FIRST, FIRST + 1, FIRST + 2} <= ports, "where hosts meet, etcd's clients, etcd's members"
            assert len(ports) >= 5, "of the agent and of its member, too"
            assert all(FIRST <= port <= LAST for port in ports), ports


def test_a_range_that_is_too_small_ends_the_command_with_two(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elastrain.launcher", "run", "--port-range", "41000-41002"]
    command += ["--run-dir", str(tmp_path / "run"), "--nproc-per-node", "4", str(SCRIPT), "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 2
    assert "--port-range 41000-41002: 3 ports, and 10 are needed here" in done.stderr
    assert not (tmp_path / "run").exists()
