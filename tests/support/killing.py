"""Kills whole jobs with SIGKILL, at a chosen moment, so that nothing of them is left but their checkpoints."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from elastrain.snapshot.durable.places.port import place_at
from elastrain.snapshot.durable.publishing import visible
from tests.support import warm
from tests.support.training import TIMEOUT_S, environment


def processes_of(run_folder: Path) -> list[int]:
    """All that still runs for a job: its workers and what they started have its folder in their environment."""
    mark = f"ELASTRAIN_RUN_DIR={run_folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def size_options(workers: int, nodes: int) -> tuple[str, ...]:
    """`nodes` simulated ones, of `workers` each; 0: one node without a store."""
    return ("--nproc-per-node", str(workers), *(("--local-nodes", str(nodes)) if nodes else ()))


def killed(
    folder: Path, checkpoints: Path, options: Sequence[str], script: Sequence[str], later_s: float, seen_in: str = ""
) -> str:
    """A job that is killed whole, so long after one more checkpoint has become visible; what it has said.

    seen_in: the folder in `checkpoints` where it is looked for, where each node has one.

    It writes one after every step, so that most moments are in the middle of one.
    """
    seen, run_folder = checkpoints / seen_in, folder / "run"
    place = place_at(str(seen))
    folder.mkdir(parents=True)
    before = set(visible(place)) if seen.exists() else set()
    command = [sys.executable, "-m", "elastrain.launcher", "run", "--run-dir", str(run_folder), *options]
    command += ["--checkpoint-dir", str(checkpoints), "--checkpoint-every", "1", *script]
    with (folder / "output.txt").open("wb") as output:
        launcher = warm.Popen(command, env=environment(), stdout=output, stderr=output)
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        while not (seen.exists() and set(visible(place)) - before):
            assert launcher.poll() is None and time.monotonic() < deadline_s, (folder / "output.txt").read_text()
            time.sleep(0.05)
        time.sleep(later_s)
    finally:
        launcher.kill()
        for pid in processes_of(run_folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    launcher.wait(timeout=30)
    while processes_of(run_folder):
        assert time.monotonic() < deadline_s, "something outlives the job"
        time.sleep(0.05)
    return (folder / "output.txt").read_text()
