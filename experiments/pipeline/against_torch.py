"""One pipeline of two against torch's own: the same model, cut and optimizer, on the same machine, in turns.

`python -m experiments.pipeline.against_torch [--turns N]` measures this alone and prints each pair of jobs.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.jobs import Script, elastic, finish
from experiments.pipeline import gpt
from experiments.pipeline.told import told
from tests.support import warm

STEPS, WARM, TURNS = 5, 2, 2
"""Steps of a job, how many of them are not counted, jobs of each."""
WAIT_S = 120.0


@dataclass(frozen=True)
class Seconds:
    """Of the steps of one job that count."""

    steps: tuple[float, ...]
    """As long as its slower member took."""
    processor: tuple[float, ...]
    """Of all threads, the mean of both members."""


def compared_times(folder: Path, *, run_length: int = 1, turns: int = TURNS) -> dict[str, Any]:
    """One pipeline of two, GPT `small`: the median step over that of torch's 1F1B with the same cut.

    The medians of all steps are compared, and those of each pair of jobs: which say more where the machine changes.
    """
    ours: list[Seconds] = []
    theirs: list[Seconds] = []
    script = Script(path=Path(gpt.__file__), args=("--steps", str(STEPS), "--run-length", str(run_length)))
    for turn in range(turns):
        mine = folder / f"gpt-{turn}"
        with elastic(mine, script, members=2, options=("--stages", "2"), start=warm.Popen) as process:
            finish(process, mine, timeout_s=WAIT_S)
        ours.append(_seconds(mine))
        theirs.append(_seconds(_torch_pipelining(folder / f"torch-{turn}", _first_of_second(told(mine).journals))))
    step_s, their_s = (statistics.median(s for job in jobs for s in job.steps) for jobs in (ours, theirs))
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "vs_torch_pipelining": step_s / their_s,
        "gpt_step_s": step_s,
        "torch_pipelining_step_s": their_s,
        "vs_torch_pairs": [_ratio(mine.steps, other.steps) for mine, other in pairs],
        "vs_torch_processor_pairs": [_ratio(mine.processor, other.processor) for mine, other in pairs],
    }


def _ratio(mine: Sequence[float], other: Sequence[float]) -> float:
    return round(statistics.median(mine) / statistics.median(other), 4)


def _seconds(folder: Path) -> Seconds:
    """The first steps warm up and do not count."""
    told_ = [[line.split() for line in path.read_text().splitlines()] for path in folder.glob("seconds-*.txt")]
    steps = [[(float(length), float(processor)) for length, processor in its] for its in told_]
    both = list(zip(*steps, strict=True))[WARM:]
    return Seconds(
        tuple(max(length for length, _ in step) for step in both),
        tuple(statistics.mean(processor for _, processor in step) for step in both),
    )


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="pairs of jobs, one after the other")
    parser.add_argument("--run-length", type=int, default=1, help="under elastrain: micro-batches summed in place")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="elastrain-against-torch-") as folder:
        found = compared_times(Path(folder), run_length=args.run_length, turns=args.turns)
    for pairs in ("vs_torch_pairs", "vs_torch_processor_pairs"):
        print(f"{pairs}: {found[pairs]}, median {statistics.median(found[pairs]):.3f}")
    print({key: round(value, 4) for key, value in found.items() if isinstance(value, float)})


if __name__ == "__main__":
    main()
