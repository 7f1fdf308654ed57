"""A process that offloads leaves its profile in the run's folder, and `elastrain offload show` reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support import warm

TRAINS = """
import sys, torch
from torch import nn
from elastrain.offload import save_on_disk

torch.set_num_threads(1)
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
offload = save_on_disk([sys.argv[1]], memory_limit=6 * 8192, quota=1 << 20, min_bytes=1024)
for _ in range(3):
    with offload:
        loss = net(torch.randn(32, 64)).square().mean()
    loss.backward()
"""


def show(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastrain.launcher", "offload", "show", *arguments]
    return warm.run(command, capture_output=True, text=True, timeout=360)


def test_what_a_worker_offloaded_is_shown_from_the_folder_of_its_run(tmp_path: Path) -> None:
    disk, run = tmp_path / "disk", tmp_path / "run"
    disk.mkdir()
    run.mkdir()
    (run / "events.jsonl").touch()
    for member in ("m0", "m10", "m2"):
        env = {**os.environ, "ELASTRAIN_RUN_DIR": str(run), "ELASTRAIN_MEMBER": member, "OMP_NUM_THREADS": "1"}
        warm.run([sys.executable, "-c", TRAINS, str(disk)], env=env, timeout=360, check=True)

    screen = show(str(run), "--plot", str(tmp_path / "memory.png"))
    assert screen.returncode == 0, screen.stderr
    lines = screen.stdout.splitlines()
    assert lines[0].split()[:3] == ["member", "passes", "limit"]
    assert [line.split()[0] for line in lines[1:4]] == ["m0", "m2", "m10"]
    assert "of a quota of 1 MiB" in screen.stdout
    assert "drive writes per day" in screen.stdout
    assert (tmp_path / "memory.png").stat().st_size > 1000

    told = json.loads(show(str(run), "--json", "--member", "m2").stdout)
    assert list(told) == ["m2"]
    assert told["m2"]["stats"]["passes"] == 3
    assert told["m2"]["stats"]["spilled_bytes"] > 0
    alone = show(str(run / "offload" / "m0.json"))
    assert alone.stdout.startswith("member    m0\n")


def test_a_run_that_did_not_offload_is_said_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    said = show(str(tmp_path))
    assert said.returncode == 2
    assert said.stderr.count("\n") == 1
    assert "holds no profile: the run did not offload" in said.stderr
