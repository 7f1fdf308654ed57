"""Real jobs without an etcd of the user's: the nodes' agents run etcd members, and hosts are lost with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastrain.launcher.namespaces.switch import lacking
from tests.support.nodes_harness import NodesJob
from tests.support.quorum_harness import QuorumHosts, quorum_hosts
from tests.support.training import Run, undisturbed
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(lacking() is not None, reason=str(lacking())),
]
HOSTS = ("h0", "h1", "h2")
ARGUMENTS = ("--steps", "28", "--backups", "1")
WAIT_S = 150.0


def start_all(hosts: QuorumHosts, *options: str, nodes: str = "2:3") -> dict[str, NodesJob]:
    """One node on each host, until all have trained together."""
    jobs = {
        host: hosts.start(host, "--nnodes", nodes, "--last-call", "40", *options, arguments=ARGUMENTS)
        for host in hosts.switch.hosts
    }
    for job in jobs.values():
        job.wait_all("view", timeout_s=WAIT_S)
        job.wait_step(2, timeout_s=WAIT_S)
    return jobs


def finish_equal(job: NodesJob) -> Run:
    run = job.finish(WAIT_S)
    alone = undisturbed(*ARGUMENTS)
    assert run.exit_code == 0, run.output
    assert set(run.digests.values()) == set(alone.digests.values())
    return run


def last_size(job: NodesJob) -> str:
    return str(job.events("quorum")[-1]["reason"])


def wait_size(job: NodesJob, size: int) -> None:
    words = {1: "one etcd", 2: "two etcd"}.get(size, f"{size} etcd")
    until(lambda: last_size(job).startswith(words), WAIT_S, f"{size} members\n{job.text()}")


def test_first_host_is_lost_whole_and_comes_back_and_the_bits_are_those_of_the_undisturbed_job(tmp_path: Path) -> None:
    with quorum_hosts(tmp_path, *HOSTS) as hosts:
        jobs = start_all(hosts)
        etcd = hosts.etcd("h0")
        assert etcd is not None
        generation = jobs["h1"].status()["generation"]
        hosts.lose("h0")
        jobs["h1"].wait_members("h1", "h2", after=generation, timeout_s=WAIT_S)
        wait_size(jobs["h1"], 2)
        back = hosts.start("h0", "--nnodes", "2:3", arguments=ARGUMENTS)
        jobs["h1"].wait_members("h0", "h1", "h2", after=generation + 1, timeout_s=WAIT_S)
        wait_size(jobs["h1"], 3)
        for job in (back, jobs["h1"], jobs["h2"]):
            job.hurry()
        for job in (back, jobs["h1"], jobs["h2"]):
            run = finish_equal(job)
            assert not (run.folder / "quorum").exists()
