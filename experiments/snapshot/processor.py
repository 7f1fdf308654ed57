"""Processor seconds per step, of all members together, and what the bare operations of a backup would take.

    python -m experiments.snapshot.processor [--backups N …]

Four members train the model of `window_train.py`. Processor time is what the kernel has counted for the members'
processes, so that other programs on the machine change little of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from elastrain.snapshot.digest import checksum
from experiments.harness import ROOT
from experiments.jobs import Script, elastic, unwind_on_sigterm
from experiments.journals import Follower
from experiments.snapshot.window import TIMEOUT_S, WAIT_S

SCRIPT = ROOT / "experiments" / "snapshot" / "window_train.py"
PATHS = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
MEMBERS, WARM, STEPS = 4, 5, 12
LAYERS, LAYER_NUMEL = 20, 1024 * 1024 + 1024


def per_step(folder: Path, backups: int) -> float:
    """One job; over so many of its steps. Raises RuntimeError where it ends meanwhile."""
    script = Script(path=SCRIPT, args=("--steps", "100000", "--backups", str(backups), "--wait-s", str(WAIT_S)))
    with elastic(folder, script, members=MEMBERS, nodes=1, options=(), environment=PATHS) as job:
        follower = Follower(folder)

        def made(steps: int) -> int:
            until_s = time.monotonic() + TIMEOUT_S
            while job.poll() is None and time.monotonic() < until_s:
                members = follower.look().members.values()
                done = min((len(member.advanced_s) for member in members), default=0)
                if len(members) == MEMBERS and done >= steps:
                    return done
                time.sleep(0.05)
            raise RuntimeError(f"the job ended or stood still: {(folder / 'output.log').read_text()[-2000:]}")

        first = made(WARM)
        pids = list(follower.run.pids.values())
        before_s = _taken_s(pids)
        last = made(first + STEPS)
        taken_s = _taken_s(pids) - before_s
        job.kill()
    return taken_s / (last - first)


def _taken_s(pids: Iterable[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def bare() -> dict[str, float]:
    """Of one thread, over the whole state: what one set of backups cannot do without, by operation."""
    torch.set_num_threads(1)
    parameters = [torch.randn(LAYER_NUMEL) for _ in range(LAYERS)]
    for parameter in parameters:
        parameter.grad = torch.randn(LAYER_NUMEL) * 1e-3
    optimizer = torch.optim.AdamW(parameters, fused=True)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    update_s = _cpu_s(optimizer.step)
    moments = [optimizer.state[parameter][name] for parameter in parameters for name in ("exp_avg", "exp_avg_sq")]
    state = [*parameters, *moments]
    into, scaled = [torch.zeros_like(tensor) for tensor in state], [torch.zeros_like(tensor) for tensor in gradients]
    return {
        "update": update_s,
        "copy_state": _cpu_s(lambda: _copy(state, into)),
        "copy_gradient": _cpu_s(lambda: _copy(gradients, scaled)),
        "checksum_state": _cpu_s(lambda: [checksum(tensor) for tensor in state]),
        "checksum_gradient": _cpu_s(lambda: [checksum(tensor) for tensor in gradients]),
    }


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _cpu_s(work: Callable[[], object]) -> float:
    work()
    found = []
    for _ in range(5):
        began_s = time.thread_time()
        work()
        found.append(time.thread_time() - began_s)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backups", type=int, nargs="*", default=[0, 1, 2])
    args = parser.parse_args()
    unwind_on_sigterm()
    figures = {f"bare_{name}_s": round(value, 4) for name, value in bare().items()}
    for backups in args.backups:
        with TemporaryDirectory(prefix="elastrain-processor-") as name:
            figures[f"step_cpu_s_b{backups}"] = round(per_step(Path(name), backups), 3)
        print(figures, file=sys.stderr, flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
