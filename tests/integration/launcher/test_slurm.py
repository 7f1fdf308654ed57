"""`elastrain launch slurm` on a real Slurm of three nodes on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm import NODES, Slurm, lacking
from tests.support.slurm_job import SlurmJob, submit
from tests.support.sources import ROOT
from tests.support.training import SCRIPT
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(lacking()), reason=lacking())]
CHECKPOINTS = ("--checkpoint-every", "100000", "--checkpoint-dir")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm") / "c") as started:
        yield started


@pytest.mark.timeout(900)
def test_the_signal_before_the_limit_writes_a_last_checkpoint_and_the_requeued_job_goes_on(
    slurm: Slurm, tmp_path: Path
) -> None:
    run = (*CHECKPOINTS, str(tmp_path / "checkpoints"))
    job = SlurmJob(slurm, tmp_path, "--nodes", "2", "--time", "0:30:00", steps=60, run=run)
    job.wait_step(2, job.wait("view")["node_name"])
    secret = job.folder / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    slurm.told("scancel", "--batch", "--signal=USR1", job.number)
    job.wait("last_checkpoint")
    resumed = job.wait("resume", start=1)
    assert resumed["step"] >= 2
    job.hurry()
    assert job.wait_end() == "COMPLETED", job.text()
    assert len(job.digests(start=1)) == 1
    assert f"goes on after step {resumed['step']}" in job.text()


@pytest.mark.timeout(900)
def test_nodes_of_a_second_slurm_job_join_and_its_scancel_is_a_hand_over(slurm: Slurm, tmp_path: Path) -> None:
    job = SlurmJob(slurm, tmp_path, "--nodes", "1:3", "--time", "0:30:00", "--sbatch=--nodes=2", steps=100000)
    job.wait_step(2, job.wait("view")["node_name"])
    known = job.computing()
    arguments = ("--join-job", job.number, "--nodes", "1", "--time", "0:30:00", "--", str(SCRIPT), "--steps", "100000")
    other = submit(slurm, tmp_path, *arguments, "--slow-while", str(tmp_path / "slow"))
    until(lambda: job.computing() != known, 180, "a worker on the node of the second job")
    node = next(name for name in job.computing() if name not in known)
    joined = job.wait("worker_start", node=node)["member"]
    job.wait("view", reason=f"{joined} joined")
    slurm.told("scancel", other)
    job.wait("leaving", members=[joined])
    job.wait("view", reason=f"{joined} lost")
    # It has left between two steps: its last step is committed, and it has begun no other one.
    journal = (job.folder / "run-0" / node / "members" / f"{joined}.jsonl").read_text().splitlines()
    assert json.loads(journal[-1])["event"] == "advance", journal[-3:]
    assert job.state() == "RUNNING"
    slurm.told("scancel", job.number)
    assert job.wait_end() == "CANCELLED"


@pytest.mark.timeout(900)
def test_a_node_that_slurm_gives_back_is_added_to_the_running_job_and_joins(tmp_path: Path) -> None:
    with Slurm(tmp_path / "c", expands=True) as slurm:
        job = SlurmJob(slurm, tmp_path / "j", "--nodes", "1:3", "--time", "0:30:00", "--sbatch=--nodes=3", steps=100000)
        job.wait_step(2, job.wait("view")["node_name"])
        job.wait("quorum", reason="3 etcd members: the loss of any one of them is survived")
        lost = next(node for node in job.computing() if node != "n1")
        slurm.kill_node(lost)
        job.wait("view", node="n1", reason=f"{job.wait('worker_start', node=lost)['member']} lost")
        until(lambda: slurm.node_state(lost).startswith("down"), 180, f"{lost} down")
        # A node that leaves the allocation and returns between two looks of the batch script stays unnoticed.
        rest = " ".join(node for node in NODES if node != lost)
        until(lambda: f"the nodes of job {job.number} are now {rest}" in job.text(), 60, "a look of the batch script")
        slurm.start_node(lost)
        until(lambda: slurm.node_state(lost) == "idle", 60, f"{lost} idle")
        assert slurm.expand(job.number, lost) == ""
        # The folder of its former run stays.
        joined = job.wait("worker_start", node=f"{lost}.2")["member"]
        job.wait("view", node="n1", reason=f"{joined} joined")
        assert job.state() == "RUNNING"
        slurm.told("scancel", job.number)
        assert job.wait_end() == "CANCELLED"


def test_a_slurm_that_does_not_permit_expansion_says_so(slurm: Slurm, tmp_path: Path) -> None:
    """`docs/slurm.md` quotes these answers of Slurm 22.05, and names the setting that changes them."""
    number = slurm.told("sbatch", "--parsable", "--nodes=1", "--output=/dev/null", text="#!/bin/sh\nsleep 60\n")
    until(lambda: slurm.told("squeue", "-h", "-j", number, "-o", "%T") == "RUNNING", 60, "the job runs")
    free = next(node for node in NODES if slurm.node_state(node) == "idle")
    refusal = slurm.expand(number, free)
    assert "Requested operation not supported on this system" in refusal
    assert refusal.removeprefix("salloc: error: ") in (ROOT / "docs/slurm.md").read_text()
    slurm.told("scancel", number)


def test_a_partition_that_does_not_exist_and_a_slurm_that_cannot_be_reached_are_one_sentence(
    slurm: Slurm, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "elastrain.launcher", "launch", "slurm", "--submit", "--time", "10"]
    (tmp_path / "slurm.conf").write_text("ClusterName=away\nSlurmctldHost=localhost\nSlurmctldPort=1\n")
    away = slurm.environment | {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    for options, environment, sentence in (
        (["--partition", "nowhere"], slurm.environment, "invalid partition specified: nowhere"),
        ([], away, "--submit: Slurm refuses the job"),
    ):
        command = [*words, *options, "--", "train.py"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=360, check=False)
        assert done.returncode == 2, done.stderr
        assert sentence in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
