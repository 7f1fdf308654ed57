"""One pipeline of two against torch's own: the same model, cut and optimizer, on the same machine, in turns."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.jobs import Script, elastic, finish
from experiments.pipeline import gpt
from experiments.pipeline.told import told
from tests.support import warm

STEPS, WARM, TURNS = 5, 2, 2
"""Steps of a job, how many of them are not counted, jobs of each."""
WAIT_S = 120.0


def compared_times(folder: Path, *, run_length: int = 1) -> dict[str, Any]:
    """One pipeline of two, GPT `small`: the median step over that of torch's 1F1B with the same cut, in turns."""
    ours: list[float] = []
    theirs: list[float] = []
    script = Script(path=Path(gpt.__file__), args=("--steps", str(STEPS), "--run-length", str(run_length)))
    for turn in range(TURNS):
        mine = folder / f"gpt-{turn}"
        with elastic(mine, script, members=2, options=("--stages", "2"), start=warm.Popen) as process:
            finish(process, mine, timeout_s=WAIT_S)
        ours += _seconds(mine)
        theirs += _seconds(_torch_pipelining(folder / f"torch-{turn}", _first_of_second(told(mine).journals)))
    step_s, their_s = statistics.median(ours), statistics.median(theirs)
    return {"vs_torch_pipelining": step_s / their_s, "gpt_step_s": step_s, "torch_pipelining_step_s": their_s}


def _seconds(folder: Path) -> list[float]:
    """Of the slower member in each step that counts; the first ones warm up."""
    each = [list(map(float, path.read_text().splitlines())) for path in folder.glob("seconds-*.txt")]
    return [max(both) for both in zip(*each, strict=True)][WARM:]


def _first_of_second(journals: Mapping[str, Sequence[Mapping[str, Any]]]) -> int:
    """The number of the first layer behind the cut that the plan has chosen."""
    lines = [line for its in journals.values() for line in its]
    blocks = next(line["blocks"] for line in lines if line["event"] == "traced")
    cut = max(line["begin"] for line in lines if line["event"] == "task")
    return int(blocks[cut].removeprefix("blocks."))


def _torch_pipelining(folder: Path, first_of_second: int) -> Path:
    """Two processes that torch's own pipelining drives."""
    folder.mkdir()
    command = [sys.executable, gpt.__file__, "--steps", str(STEPS), "--first-of-second", str(first_of_second)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        meeting = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        its = {**os.environ, **meeting, "OMP_NUM_THREADS": "1", "ELASTRAIN_RUN_DIR": str(folder)}
        with (folder / f"output-{rank}.log").open("wb") as output:
            processes.append(warm.Popen(command, env=its, stdout=output, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(WAIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError((folder / "output-0.log").read_text() + (folder / "output-1.log").read_text())
    return folder
