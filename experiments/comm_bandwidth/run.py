"""How fast is the communicator beside Gloo? fp32 all_reduce and a DDP step on one host, in one interleaved run.

`python -m experiments.comm_bandwidth.run [--quick]`. Which cases run and which ratios are made of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from elastrain.base.held_folder import held_folder
from experiments.comm_bandwidth.worker import Settings
from experiments.harness import ROOT, Reach, add_record_flag, quantile, ratio, record, report
from experiments.plots import lines

REACHES = {
    "speedup_resident": Reach(limit=6, at_least=True),
    "speedup_ordinary": Reach(limit=3.5, at_least=True),
    "speedup_small": Reach(limit=3, at_least=True),
    "tcp_speedup": Reach(limit=1.0, at_least=True),
    "ddp_step_ratio": Reach(limit=0.9),
}
WORLDS = (2, 4)
SIZES_BYTES = (4 << 10, 256 << 10, 4 << 20, 64 << 20)
SMALL_BYTES, LARGE_BYTES = SIZES_BYTES[0], 4 << 20
Found = Mapping[str, Sequence[float]]


def measure(world: int, *, shared: bool, rounds: int, ddp_rounds: int) -> dict[str, list[float]]:
    """Seconds by case, one per round. Raises RuntimeError with the end of its output if a process fails."""
    with held_folder("elastrain-bandwidth-") as folder:
        settings = [
            Settings(
                rank=rank,
                world=world,
                shared=shared,
                sizes_bytes=SIZES_BYTES,
                rounds=rounds,
                ddp_rounds=ddp_rounds,
                folder=str(folder),
            )
            for rank in range(world)
        ]
        command = [sys.executable, "-m", "experiments.comm_bandwidth.worker"]
        started = [
            subprocess.Popen(
                [*command, json.dumps(asdict(one))],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for one in settings
        ]
        try:
            said = [process.communicate(timeout=300)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        failed = [words for process, words in zip(started, said, strict=True) if process.returncode]
        if failed:
            raise RuntimeError(f"{len(failed)} of {world} processes failed; one said:\n{failed[0][-2000:]}")
        found: dict[str, list[float]] = json.loads((Path(folder) / "found.json").read_text())
        return found


def speedups(found: Found, what: str) -> dict[int, float]:
    """Gloo's time over ours by size, as far as it was measured."""
    sizes = [int(name.split()[1]) for name in found if name.startswith(f"{what} ")]
    return {size: ratio(found[f"gloo {size}"], found[f"{what} {size}"]) for size in sizes}


def figures(shared: Mapping[int, Found], tcp: Mapping[int, Found]) -> dict[str, float]:
    """The keys of the README out of each world's measurements."""
    values: dict[str, float] = {}
    for world, found in shared.items():
        for what in ("resident", "ordinary"):
            values |= {f"{what}_{world}_{size}": value for size, value in speedups(found, what).items()}
        for what, key in {"copy": "bound", "floor": "floor", "bare": "bare"}.items():
            values |= {f"{key}_{world}_{size}": value for size, value in speedups(found, what).items()}
        values[f"ddp_{world}"] = ratio(found["ddp elastrain"], found["ddp gloo"])
        values |= {f"{name.replace(' ', '_')}_{world}_s": quantile(times, 0.5) for name, times in found.items()}
    for world, found in tcp.items():
        values |= {f"tcp_{world}_{size}": value for size, value in speedups(found, "ordinary").items()}
        values |= {f"tcp_{name.replace(' ', '_')}_{world}_s": quantile(times, 0.5) for name, times in found.items()}
    large = [(world, size) for world in shared for size in SIZES_BYTES if size >= LARGE_BYTES]
    all_tcp = [values[f"tcp_{world}_{size}"] for world in tcp for size in SIZES_BYTES]
    small = [values[f"{what}_{world}_{SMALL_BYTES}"] for world in shared for what in ("resident", "ordinary")]
    reached = {
        "speedup_resident": min(values[f"resident_{world}_{size}"] for world, size in large),
        "speedup_ordinary": min(values[f"ordinary_{world}_{size}"] for world, size in large),
        "speedup_small": min(small),
        "tcp_speedup": math.exp(sum(math.log(value) for value in all_tcp) / len(all_tcp)),
        "ddp_step_ratio": max(values[f"ddp_{world}"] for world in shared),
    }
    return {**reached, **values}


def plot(values: Mapping[str, float]) -> None:
    """Milliseconds over bytes, everything on logarithmic scales."""
    names = {"gloo": "Gloo", "ordinary": "ordinary tensors", "resident": "tensors of empty()", "copy": "plain copy"}
    series = {
        f"{words}, {world} processes": (
            [math.log2(size) for size in SIZES_BYTES],
            [math.log10(values[f"{name}_{size}_{world}_s"] * 1e3) for size in SIZES_BYTES],
        )
        for world in WORLDS
        for name, words in names.items()
    }
    path = ROOT / "experiments/comm_bandwidth/results/all_reduce.png"
    lines(path, series, labels=("log2 of bytes", "log10 of milliseconds"), title="fp32 all_reduce on one host")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds (≤ 90 s)")
    parser.add_argument("--rounds", type=int, default=25, help="interleaved rounds of the full run")
    add_record_flag(parser)
    args = parser.parse_args()
    rounds, ddp_rounds = (7, 7) if args.quick else (args.rounds, args.rounds)
    shared = {world: measure(world, shared=True, rounds=rounds, ddp_rounds=ddp_rounds) for world in WORLDS}
    tcp = {world: measure(world, shared=False, rounds=rounds, ddp_rounds=0) for world in WORLDS}
    values = figures(shared, tcp)
    settings = {"rounds": rounds, "ddp_rounds": ddp_rounds, "worlds": WORLDS, "sizes_bytes": SIZES_BYTES}
    if args.record:
        record("comm_bandwidth", values, quick=args.quick, settings=settings)
        plot(values)
    met = report(values, REACHES)
    return 0 if met or args.quick else 1


if __name__ == "__main__":
    sys.exit(main())
