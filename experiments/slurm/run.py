"""Does a job on a real Slurm outlive a node, and its own time limit? See README.md.

`python -m experiments.slurm.run [--record]`. Needs Debian's slurm-wlm and munge, and root: a whole Slurm of three nodes
is started on loopback, and ended.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.harness import ROOT, Reach, add_record_flag, record, report
from tests.support.slurm import Slurm, lacking
from tests.support.slurm_job import SlurmJob
from tests.support.training import SCRIPT

STEPS = 80
REACHES = {
    "digest_equal": Reach(limit=1, at_least=True),
    "lived": Reach(limit=1, at_least=True),
    "requeued_step_lost": Reach(limit=0),
    "started_s": Reach(limit=20),
}


def digest_alone(folder: Path) -> str:
    """The digest of an undisturbed job of one worker, without Slurm."""
    run = folder / "alone"
    command = [sys.executable, "-m", "elastrain.launcher", "run", "--run-dir", str(run), str(SCRIPT)]
    subprocess.run([*command, "--steps", str(STEPS)], cwd=ROOT, check=True, capture_output=True, timeout=600)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return next(str(event["digest"]) for event in events if event["event"] == "finished")


def lose_a_node(slurm: Slurm, folder: Path, right: str) -> dict[str, Any]:
    """A node loses its `slurmd` and its step, and a spare takes its place."""
    began_s = time.time()
    job = SlurmJob(slurm, folder, "--nodes", "2", "--spares", "1", "--time", "0:20:00", steps=STEPS)
    first = job.wait("view")
    job.wait("spare_waits")
    lost = next(node for node in job.computing() if node != "n1")
    job.wait_step(3, lost)
    struck_s = time.time()
    slurm.kill_node(lost)
    joined = job.wait("spare_begins")
    job.wait("worker_start", node=joined["node"])
    view = job.wait("view", node=joined["node"], reason=f"{_member(job, joined['node'])} joined")
    job.hurry()
    state = job.wait_end()
    slurm.start_node(lost)
    return {
        "started_s": first["wall"] - began_s,
        "takeover_s": view["wall"] - struck_s,
        "lived": state == "COMPLETED",
        "lost_digest_equal": job.digests() == {right},
    }


def _member(job: SlurmJob, node: str) -> str:
    return str(job.wait("worker_start", node=node)["member"])


def pass_the_limit(slurm: Slurm, folder: Path, right: str) -> dict[str, Any]:
    """The time limit passes: a last checkpoint, a requeue by Slurm, and the same job goes on from it."""
    checkpoints = ("--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", "100000")
    job = SlurmJob(slurm, folder, "--nodes", "2", "--time", "0:02:00", steps=STEPS, run=checkpoints)
    job.wait("last_checkpoint", timeout_s=300)
    resumed = job.wait("resume", start=1, timeout_s=300)
    job.hurry()
    state = job.wait_end()
    newest = max(int(path.name.rpartition("-")[2]) for path in (folder / "checkpoints").glob("life-*"))
    written = [event["step"] for event in job.events("checkpoint") if "step" in event]
    return {
        "requeued_state": state,
        "requeued_step_lost": max([newest, *written]) - int(resumed["step"]),
        "requeued_digest_equal": job.digests(start=1) == {right},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_record_flag(parser)
    asked = parser.parse_args()
    if reason := lacking():
        raise SystemExit(f"no Slurm can be started here: {reason}")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="elastrain-slurm-") as folder:
        right = digest_alone(Path(folder))
        with Slurm(Path(folder) / "slurm") as slurm:
            figures |= lose_a_node(slurm, Path(folder) / "lost", right)
            figures |= pass_the_limit(slurm, Path(folder) / "limit", right)
    figures["digest_equal"] = figures.pop("lost_digest_equal") and figures.pop("requeued_digest_equal")
    if asked.record:
        record("slurm", figures, quick=False, settings={"steps": STEPS})
    report(figures, REACHES)


if __name__ == "__main__":
    main()
