"""What do half precision, a second backup, BatchNorm and freedom from determinism cost, against float32 deterministic?

`python -m experiments.price.kinds [--rounds N] [--steps N] [--only KIND …]`. Three workers, cases interleaved, as in
`run.py`; float32 is always among them. `--kernels` measures the kinds' forward and backward alone, in this process.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict

import torch

from experiments.baselines.workload import Workload
from experiments.harness import add_record_flag, interleave, quantile, ratio, record, report
from experiments.price.run import RUN_LENGTH, Run, elastrain_job, run_of
from experiments.price.worker import of_kind
from experiments.train_gpt.model import build, next_token_loss

BASE = "fp32"
MEMBERS = 3
"""The fewest that can keep two backups."""
KERNEL_ROUNDS = 7
CASES: dict[str, tuple[str, int]] = {
    "fp32": ("fp32", 1),
    "bf16": ("bf16", 1),
    "fp16_scaled": ("fp16", 1),
    "batchnorm": ("batchnorm", 1),
    "not_deterministic": ("free", 1),
    "backups_2": ("fp32", 2),
}
"""Name -> kind (see `worker.py`) and backups."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each case")
    parser.add_argument("--kernels", action="store_true", help="only forward and backward, without a job")
    parser.add_argument("--only", nargs="+", choices=[name for name in CASES if name != BASE], help="default: all")
    add_record_flag(parser)
    args = parser.parse_args()
    cases = {name: case for name, case in CASES.items() if args.only is None or name in (BASE, *args.only)}
    if args.kernels:
        return report_kernels(keep=args.record)
    work = Workload(steps=args.steps, warmup_steps=2, weigh=False, micro_batch_size=4)

    def job(kind: str, backups: int) -> Run:
        return run_of(elastrain_job(work, MEMBERS, backups=backups, kind=kind))

    found = interleave({name: lambda case=case: job(*case) for name, case in cases.items()}, rounds=args.rounds)
    times = {name: [run.step_s for run in runs] for name, runs in found.items()}
    cpu = {name: [run.cpu_s for run in runs] for name, runs in found.items()}
    values = {f"price_{name}": ratio(times[name], times[BASE]) for name in cases if name != BASE}
    values |= {f"cpu_price_{name}": ratio(cpu[name], cpu[BASE]) for name in cases if name != BASE}
    values |= {f"{name}_step_s": quantile(each, 0.5) for name, each in times.items()}
    settings = {"kinds": True, "members": MEMBERS, "rounds": args.rounds, **asdict(work), "run_length": RUN_LENGTH}
    if args.record:
        record("price", values, quick=True, settings=settings)
    report(values, {})
    return 0


def report_kernels(*, keep: bool) -> int:
    """Median seconds of one micro-batch in float32, and of the other kinds against it, interleaved."""
    torch.set_num_threads(1)
    work = Workload(micro_batch_size=4)
    tokens = torch.randint(256, (2, work.micro_batch_size, work.context), generator=torch.Generator().manual_seed(0))
    models = {kind: of_kind(build(work.size, seed=0), kind) for kind in ("fp32", "bf16", "fp16", "batchnorm")}

    def seconds(kind: str) -> float:
        began_s = time.perf_counter()
        next_token_loss(models[kind], (tokens[0], tokens[1])).backward()
        return time.perf_counter() - began_s

    cases = {kind: lambda kind=kind: seconds(kind) for kind in models}
    interleave(cases, rounds=1)  # the first of each makes the gradients
    found = interleave(cases, rounds=KERNEL_ROUNDS)
    values = {f"kernels_{kind}": ratio(found[kind], found[BASE]) for kind in models if kind != BASE}
    values[f"kernels_{BASE}_s"] = quantile(found[BASE], 0.5)
    if keep:
        record("price", values, quick=True, settings={"kernels": True, "rounds": KERNEL_ROUNDS, **asdict(work)})
    report(values, {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
