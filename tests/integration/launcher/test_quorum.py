"""Real jobs without an etcd of the user's: the nodes' agents run etcd members, and hosts are lost with them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastrain.launcher.namespaces.impairments import Condition, Loss, between, condition
from elastrain.launcher.namespaces.switch import SWITCH, lacking
from elastrain.launcher.quorum.join_hosts import DEFAULT_PORT
from tests.integration.launcher.test_exposure import SCAN
from tests.support.free_ports import free_ports
from tests.support.nodes_harness import NodesJob
from tests.support.quorum_harness import QuorumHosts, quorum_hosts
from tests.support.sources import ROOT
from tests.support.training import Run, undisturbed
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
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


def test_two_of_three_members_stand_still_so_training_goes_on_and_a_change_of_the_view_parks(tmp_path: Path) -> None:
    with quorum_hosts(tmp_path, *HOSTS) as hosts:
        jobs = start_all(hosts)
        stopped = [pid for host in ("h0", "h1") if (pid := hosts.etcd(host)) is not None]
        assert len(stopped) == 2
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        jobs["h2"].wait_step(jobs["h2"].status()["step"] + 3, timeout_s=WAIT_S)
        generation = jobs["h2"].status()["generation"]
        jobs["h1"].kill(jobs["h1"].events("worker_start")[0]["member"])
        jobs["h2"].wait("parked", timeout_s=WAIT_S)
        assert jobs["h2"].status()["generation"] == generation
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        jobs["h2"].wait_members(*HOSTS, after=generation, timeout_s=WAIT_S)
        for job in jobs.values():
            job.hurry()
        for job in jobs.values():
            finish_equal(job)


def test_lost_member_is_removed_and_an_unnamed_node_takes_its_place(tmp_path: Path) -> None:
    with quorum_hosts(tmp_path, *HOSTS, "h3") as hosts:
        jobs = start_all(hosts, nodes="2:4")
        assert hosts.etcd("h3") is None
        hosts.lose("h1")
        until(lambda: hosts.etcd("h3") is not None, WAIT_S, "a member on h3")
        wait_size(jobs["h0"], 3)
        assert not any("4 etcd" in event["reason"] for event in jobs["h0"].events("quorum"))
        for host in ("h0", "h2", "h3"):
            jobs[host].hurry()
        for host in ("h0", "h2", "h3"):
            finish_equal(jobs[host])


def test_killed_etcd_comes_back_as_a_new_member(tmp_path: Path) -> None:
    with quorum_hosts(tmp_path, *HOSTS) as hosts:
        jobs = start_all(hosts)
        etcd = hosts.etcd("h2")
        assert etcd is not None
        os.kill(etcd, signal.SIGKILL)
        jobs["h2"].wait("quorum_anew", timeout_s=WAIT_S)
        jobs["h2"].wait("quorum_added", timeout_s=WAIT_S)
        until(lambda: hosts.etcd("h2") not in (None, etcd), WAIT_S, "etcd on h2")
        for job in jobs.values():
            job.hurry()
        for job in jobs.values():
            finish_equal(job)


def test_whole_job_is_stopped_and_goes_on_from_its_checkpoint_on_other_hosts(tmp_path: Path) -> None:
    kept = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "4")
    with quorum_hosts(tmp_path, *HOSTS, "h3") as hosts:
        early, late = HOSTS[:2], ("h2", "h3")
        first = [hosts.start(host, "--nnodes", "2", *kept, arguments=ARGUMENTS, join=early) for host in early]
        for job in first:
            job.wait_step(6, timeout_s=WAIT_S)
        for job in first:
            os.kill(job.process.pid, signal.SIGINT)
        for job in first:
            assert job.end(WAIT_S).exit_code != 0
        later = [hosts.start(host, "--nnodes", "2", *kept, arguments=ARGUMENTS, join=late) for host in late]
        for job in later:
            job.hurry()
        for job in later:
            job.finish(WAIT_S)
        alone = undisturbed(*ARGUMENTS)
        for job in later:
            run = job.end()
            assert run.exit_code == 0, run.output
            assert set(run.digests.values()) == set(alone.digests.values())
            assert (
                min(event["step"] for lines in run.journals.values() for event in lines if event["event"] == "passed")
                > 0
            )


def test_cable_of_the_first_host_is_cut_and_mended(tmp_path: Path) -> None:
    with quorum_hosts(tmp_path, *HOSTS) as hosts:
        jobs = start_all(hosts)
        generation = jobs["h1"].status()["generation"]
        hosts.switch.apply(condition([Loss(pairs=between(["h0"], [SWITCH, "h1", "h2"]))]))
        jobs["h1"].wait_members("h1", "h2", after=generation, timeout_s=WAIT_S)
        wait_size(jobs["h1"], 2)
        jobs["h1"].wait_step(jobs["h1"].status()["step"] + 2, timeout_s=WAIT_S)
        hosts.switch.apply(Condition())
        jobs["h1"].wait_members(*HOSTS, after=generation + 1, timeout_s=WAIT_S)
        wait_size(jobs["h1"], 3)
        for job in jobs.values():
            job.hurry()
        for job in jobs.values():
            finish_equal(job)


def test_first_host_hands_over_and_its_member_leaves_the_quorum_at_once(tmp_path: Path) -> None:
    with quorum_hosts(tmp_path, *HOSTS) as hosts:
        jobs = start_all(hosts)
        generation = jobs["h1"].status()["generation"]
        os.kill(jobs["h0"].process.pid, signal.SIGTERM)
        assert jobs["h0"].end(WAIT_S).exit_code == 143
        assert not (jobs["h0"].run.path / "quorum").exists()
        jobs["h1"].wait_members("h1", "h2", after=generation, timeout_s=WAIT_S)
        wait_size(jobs["h1"], 2)
        assert not jobs["h1"].events("quorum_removed") and not jobs["h2"].events("quorum_removed")
        for host in ("h1", "h2"):
            jobs[host].hurry()
        for host in ("h1", "h2"):
            finish_equal(jobs[host])


def test_scan_from_another_host_finds_only_ports_that_want_proof(tmp_path: Path) -> None:
    with quorum_hosts(tmp_path, *HOSTS) as hosts:
        jobs = {host: hosts.start(host, "--nnodes", "2", arguments=ARGUMENTS, join=("h0", "h1")) for host in HOSTS[:2]}
        jobs["h0"].wait_step(2, timeout_s=WAIT_S)
        scan = [*hosts.switch.inside("h2"), sys.executable, "-c", SCAN, hosts.switch.address("h0"), "quorum"]
        done = subprocess.run(scan, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        said = {int(port): words for port, words in json.loads(done.stdout).items()}
        # Beside the quorum's three ports, an agent and a member listen.
        assert len(said) == 5 and {DEFAULT_PORT, DEFAULT_PORT + 1, DEFAULT_PORT + 2} < said.keys(), said
        assert "let in" not in said.values()
        for port in range(DEFAULT_PORT, DEFAULT_PORT + 3):
            command = ["openssl", "s_client", "-connect", f"{hosts.switch.address('h0')}:{port}", "-quiet"]
            spoken = subprocess.run(
                [*hosts.switch.inside("h2"), *command],
                input="GET /version HTTP/1.1\r\nHost: h0\r\n\r\n",
                capture_output=True,
                text=True,
                timeout=30,
            )
            assert "alert" in spoken.stderr and "etcdserver" not in spoken.stdout, (port, spoken)
        for job in jobs.values():
            job.hurry()
        for job in jobs.values():
            finish_equal(job)


def test_killed_agent_leaves_no_etcd_and_no_data(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    port = free_ports(3)[0]
    given = ("--nnodes", "1", "--join", f"127.0.0.1:{port}", "--rdzv-id", "alone", "--secret-file", str(secret))
    with NodesJob(tmp_path, *given, arguments=ARGUMENTS) as job:
        job.wait_step(2, timeout_s=WAIT_S)
        assert last_size(job).startswith("one etcd member")
        data = job.run.path / "quorum"
        assert data.stat().st_mode & 0o777 == 0o700
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait(30)
        until(lambda: not data.exists(), 60, "the end of the data")
        until(lambda: not etcds(data), 60, "the end of etcd")


def etcds(data: Path) -> list[str]:
    """Processes with the folder in their command line."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(data).encode() in command.read_bytes():
                found.append(command.parent.name)
        except OSError:  # it has just ended
            continue
    return found
