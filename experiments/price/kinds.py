"""What do half precision, a second backup, BatchNorm and freedom from determinism cost, against float32 deterministic?

`python -m experiments.price.kinds [--rounds N] [--steps N] [--only KIND …]`. Three workers, cases interleaved, as in
`run.py`; float32 is always among them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from experiments.baselines.workload import Workload
from experiments.harness import interleave, quantile, ratio, record, report
from experiments.price.run import RUN_LENGTH, Run, elastrain_job, run_of

BASE = "fp32"
MEMBERS = 3
"""The fewest that can keep two backups."""
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
    parser.add_argument("--only", nargs="+", choices=[name for name in CASES if name != BASE], help="default: all")
    args = parser.parse_args()
    cases = {name: case for name, case in CASES.items() if args.only is None or name in (BASE, *args.only)}
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
    record("price", values, quick=True, settings=settings)
    report(values, {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
