"""Scripts without `job.steps` under `elastrain run`, and the same script with the same kill under torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.nodes_harness import ELASTRAIN
from tests.support.training import environment

pytestmark = pytest.mark.slow

# Workers that stand still end by themselves. torchrun's do after a restart, if they share their agent's store.
SCRIPT = """
import faulthandler
import os
import signal
import sys

import torch
import torch.distributed as dist

faulthandler.dump_traceback_later(40, exit=True)
dist.init_process_group("gloo")
rank, restart = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
summed = torch.ones(4)
for step in range(6):
    dist.all_reduce(summed)
    if step == 3 and rank == 1 and restart < int(sys.argv[1]):
        if sys.argv[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("odd")
sys.stdout.write(f"done {rank} of {dist.get_world_size()} {summed[0]:g}\\n")
dist.destroy_process_group()
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def outcome(tmp_path: Path, command: tuple[str, ...], *told: str) -> tuple[int, list[str], str]:
    """The exit code, what the workers that came through have said, and all that was said."""
    script = tmp_path / "plain.py"
    script.write_text(SCRIPT)
    ran = warm.run(
        [*command, str(script), *told],
        env=environment() | {"ELASTRAIN_HOME": str(tmp_path / "home"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return (
        ran.returncode,
        sorted(line for line in ran.stdout.splitlines() if line.startswith("done")),
        ran.stdout + ran.stderr,
    )


@pytest.mark.parametrize(("times", "how"), [("1", "kill"), ("1", "raise"), ("9", "kill")])
def test_the_same_script_with_the_same_kill_ends_as_under_torchrun(tmp_path: Path, times: str, how: str) -> None:
    size = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    code, done, said = outcome(tmp_path, (*ELASTRAIN, "run", *size), times, how)
    assert (code, done) == outcome(tmp_path, (*TORCHRUN, *size), times, how)[:2]
    assert (code, len(done)) == ((0, 2) if times == "1" else (1, 0))
    assert said.count("all workers are started again") == int(min(times, "2"))


def test_workers_on_all_nodes_are_started_again(tmp_path: Path) -> None:
    size = ("--local-nodes", "2", "--nproc-per-node", "1", "--max-restarts", "2")
    code, done, said = outcome(tmp_path, (*ELASTRAIN, "run", *size), "1", "kill")
    assert (code, done) == (0, ["done 0 of 2 64", "done 1 of 2 64"]), said
