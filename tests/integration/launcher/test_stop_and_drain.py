"""`elastrain stop` and `elastrain drain` on a real job of two simulated nodes, and what `ls` and `logs` then show."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.nodes_harness import ELASTRAIN, NodesJob

pytestmark = pytest.mark.slow


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return warm.run([*ELASTRAIN, *words], capture_output=True, text=True, timeout=180)


def test_a_node_is_drained_and_comes_to_no_loss_then_the_job_is_stopped_with_a_last_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    options = ("--local-nodes", "3", "--checkpoint-dir", str(place), "--checkpoint-every", "1000", "--tee", "3")
    with NodesJob(tmp_path, *options, arguments=("--steps", "100000")) as job:
        run = str(job.run.path)
        job.wait_step(2)
        job.wait_copied()
        generation = int(job.status()["generation"])
        refused = command("drain", "nobody", "--run", run)
        assert refused.returncode == 1 and "there are node0, node1, node2" in refused.stderr
        drained = command("drain", "node1", "--run", run)
        assert drained.returncode == 0, drained.stderr
        job.wait_members("node0", "node2", after=generation)
        job.wait_copied()
        stopped = command("stop", run)
        assert stopped.returncode == 0, stopped.stderr
        # The highest of the nodes: 143 of the one that was drained, 130 of the others.
        assert job.process.wait(180) == 143, job.text()
        said = job.text()
        assert "drained by `elastrain drain`: m1 hand over" in said
        assert "stopped by `elastrain stop`: one last checkpoint is written" in said and "is complete" in said
        assert list(place.glob("life-*"))
        shown = command("logs", "m1", "--run", run)
        assert "m1 has handed over" in shown.stdout, shown.stderr
