"""What does elastrain cost when nothing fails? Against a plain loop, DDP and ZeRO-1, in one interleaved run.

`python -m experiments.price.run [--scripts|--watched] [--quick]`. Which cases run and which ratios are made of them;
trainers live elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from experiments.baselines import ddp, plain, zero1
from experiments.baselines.workload import Measurement, Workload, cpu_seconds, heaviest, step_seconds
from experiments.harness import ROOT, Reach, add_record_flag, interleave, quantile, ratio, record, report
from experiments.plots import bars
from experiments.price.watched import starts, storm_figures, watched_job

REACHES = {
    "price_1": Reach(limit=1.03),
    "scaling_2": Reach(limit=0.95, at_least=True),
    "backup_price": Reach(limit=1.03),
    "time_ratio_ddp": Reach(limit=1.05),
    "bytes_ratio_zero1": Reach(limit=1.15),
}
SCRIPTS_REACHES = {"time_ratio": Reach(limit=1.01)}
WATCHED_REACHES = {
    "time_ratio_watched": Reach(limit=1.01),
    "report_s": Reach(limit=5.0),
    "bytes": Reach(limit=3e6),
    "console_errors": Reach(limit=0.0),
    "contrast": Reach(limit=4.5, at_least=True),
    "help_cpu_s": Reach(limit=0.35),
    "status_cpu_s": Reach(limit=0.35),
}

RUN_LENGTH = 2
LEAN_RUN_LENGTH = 4
"""`c` of the runs that are weighed: one run of micro-batches per member at 4 members."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One job's figures: its seconds per step, and its heaviest member's tensor bytes if it was weighed."""

    step_s: float
    cpu_s: float
    """Processor seconds per step of all members together."""
    peak_bytes: int | None = None
    resting_bytes: int | None = None


def run_of(found: Sequence[Measurement]) -> Run:
    return Run(
        step_s=step_seconds(found),
        cpu_s=cpu_seconds(found),
        peak_bytes=heaviest(one.peak_bytes for one in found),
        resting_bytes=heaviest(one.resting_bytes for one in found),
    )


def elastrain_job(
    work: Workload,
    members: int,
    *,
    backups: int = 0,
    run_length: int = RUN_LENGTH,
    kind: str = "fp32",
    logs: bool = False,
) -> list[Measurement]:
    """One undisturbed job under `elastrain run`.

    Raises RuntimeError with the end of its output if it fails or a member leaves no measurement.
    """
    with tempfile.TemporaryDirectory(prefix="elastrain-price-") as name:
        out = Path(name) / "measured"
        out.mkdir()
        command = [str(Path(sys.executable).with_name("elastrain")), "run", "--standalone"]
        command += ["--nproc-per-node", str(members), str(ROOT / "experiments" / "price" / "worker.py")]
        command += ["--out", str(out), "--work", json.dumps(asdict(work))]
        command += ["--backups", str(backups), "--run-length", str(run_length), "--kind", kind]
        command += ["--log", str(Path(name) / "log.jsonl")] if logs else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=name, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        found = [Measurement(**json.loads(file.read_text())) for file in out.glob("*.json")]
    if done.returncode or len(found) != members:
        tail = (done.stdout + done.stderr)[-2000:]
        raise RuntimeError(
            f"expected {members} measurements and exit code 0; got {len(found)}, {done.returncode}:\n{tail}"
        )
    return found


def cases(work: Workload) -> dict[str, Callable[[], Run]]:
    """Every job that the figures need; only those whose memory is compared are weighed."""
    light, heavy = replace(work, weigh=False), replace(work, weigh=True, steps=1)
    lean = LEAN_RUN_LENGTH
    return {
        "plain_1": lambda: run_of(plain.run(light, 1)),
        "elastrain_1": lambda: run_of(elastrain_job(light, 1)),
        "plain_2": lambda: run_of(plain.run(light, 2)),
        "elastrain_2": lambda: run_of(elastrain_job(light, 2)),
        "ddp_2": lambda: run_of(ddp.run(light, 2)),
        "elastrain_4": lambda: run_of(elastrain_job(light, 4)),
        "elastrain_4_backup": lambda: run_of(elastrain_job(light, 4, backups=1)),
        "ddp_4": lambda: run_of(ddp.run(light, 4)),
        "zero1_4": lambda: run_of(zero1.run(heavy, 4)),
        "lean_4": lambda: run_of(elastrain_job(heavy, 4, run_length=lean)),
        "lean_4_backup": lambda: run_of(elastrain_job(heavy, 4, backups=1, run_length=lean)),
    }


def scripts_cases(work: Workload) -> dict[str, Callable[[], Run]]:
    """The same job without figures and logs, and with them."""
    light = replace(work, weigh=False)
    return {
        "bare_1": lambda: run_of(elastrain_job(light, 1)),
        "logs_1": lambda: run_of(elastrain_job(light, 1, logs=True)),
        "bare_2": lambda: run_of(elastrain_job(light, 2)),
        "logs_2": lambda: run_of(elastrain_job(light, 2, logs=True)),
    }


def scripts_figures(found: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """`time_ratio` is the worse one of one and two workers."""
    times = {name: [run.step_s for run in runs] for name, runs in found.items()}
    cpu = {name: [run.cpu_s for run in runs] for name, runs in found.items()}
    ratios = {f"time_ratio_{n}": ratio(times[f"logs_{n}"], times[f"bare_{n}"]) for n in (1, 2)}
    cpu_ratios = {f"cpu_ratio_{n}": ratio(cpu[f"logs_{n}"], cpu[f"bare_{n}"]) for n in (1, 2)}
    seconds = {f"{name}_step_s": quantile(values, 0.5) for name, values in times.items()}
    return {"time_ratio": max(ratios.values()), **ratios, **cpu_ratios, **seconds}


def watched_cases(work: Workload) -> dict[str, Callable[[], Run]]:
    """The same job unwatched, and beside `top` and a reader of its metrics."""
    light = replace(work, weigh=False)
    return {
        "bare_1": lambda: run_of(elastrain_job(light, 1)),
        "watched_1": lambda: run_of(watched_job(light, 1)),
        "bare_2": lambda: run_of(elastrain_job(light, 2)),
        "watched_2": lambda: run_of(watched_job(light, 2)),
    }


def watched_figures(found: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """`time_ratio_watched` is that of one worker: two leave no core of this machine for those who watch."""
    times = {name: [run.step_s for run in runs] for name, runs in found.items()}
    cpu = {name: [run.cpu_s for run in runs] for name, runs in found.items()}
    return {
        "time_ratio_watched": ratio(times["watched_1"], times["bare_1"]),
        "time_ratio_watched_2": ratio(times["watched_2"], times["bare_2"]),
        **{f"cpu_ratio_watched_{n}": ratio(cpu[f"watched_{n}"], cpu[f"bare_{n}"]) for n in (1, 2)},
        **{f"{name}_step_s": quantile(values, 0.5) for name, values in times.items()},
    }


def figures(found: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """The keys of the README out of every case's runs, one per round."""
    times = {name: [run.step_s for run in runs] for name, runs in found.items()}
    cpu = {name: [run.cpu_s for run in runs] for name, runs in found.items()}
    weighed = {name: runs for name, runs in found.items() if all(run.peak_bytes for run in runs)}
    peaks = {name: [float(run.peak_bytes or 0) for run in runs] for name, runs in weighed.items()}
    resting = {name: [float(run.resting_bytes or 0) for run in runs] for name, runs in weighed.items()}
    time_ratio_ddp_2 = ratio(times["elastrain_2"], times["ddp_2"])
    time_ratio_ddp_4 = ratio(times["elastrain_4"], times["ddp_4"])
    speedup = ratio(times["elastrain_1"], times["elastrain_2"])
    allowed = ratio(times["plain_1"], times["plain_2"])
    two_alone = [seconds / 2 for seconds in times["plain_2"]]
    return {
        "price_1": ratio(times["elastrain_1"], times["plain_1"]),
        "scaling_2": speedup / 2 / allowed,
        "machine_scaling_2": allowed,
        "throughput_2_of_two_plain": ratio(two_alone, times["elastrain_2"]),
        "time_ratio_ddp_4_backup": ratio(times["elastrain_4_backup"], times["ddp_4"]),
        "backup_price": ratio(times["elastrain_4_backup"], times["elastrain_4"]),
        "time_ratio_ddp": max(time_ratio_ddp_2, time_ratio_ddp_4),
        "time_ratio_ddp_2": time_ratio_ddp_2,
        "time_ratio_ddp_4": time_ratio_ddp_4,
        "time_ratio_zero1_4": ratio(times["elastrain_4"], times["zero1_4"]),
        "cpu_price_1": ratio(cpu["elastrain_1"], cpu["plain_1"]),
        "cpu_backup_price": ratio(cpu["elastrain_4_backup"], cpu["elastrain_4"]),
        "cpu_ratio_ddp_4": ratio(cpu["elastrain_4"], cpu["ddp_4"]),
        "bytes_ratio_zero1": ratio(peaks["lean_4"], peaks["zero1_4"]),
        "bytes_ratio_zero1_backup": ratio(peaks["lean_4_backup"], peaks["zero1_4"]),
        "resting_ratio_zero1": ratio(resting["lean_4"], resting["zero1_4"]),
        **{f"{name}_step_s": quantile(values, 0.5) for name, values in times.items()},
        **{f"{name}_cpu_s": quantile(values, 0.5) for name, values in cpu.items()},
        **{f"{name}_peak_bytes": quantile(values, 0.5) for name, values in peaks.items()},
        **{f"{name}_resting_bytes": quantile(values, 0.5) for name, values in resting.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round (≤ 90 s on 2 quiet cores)")
    parser.add_argument("--scripts", action="store_true", help="the price of step.add and job.log instead")
    parser.add_argument("--watched", action="store_true", help="the price of top, metrics, report and status instead")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of the full run")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each case of the full run")
    add_record_flag(parser)
    args = parser.parse_args()
    quick = args.quick
    work = Workload(steps=2, warmup_steps=1) if quick else Workload(steps=args.steps)
    rounds = 1 if quick else args.rounds
    if args.scripts:
        values = scripts_figures(interleave(scripts_cases(work), rounds=rounds))
        if args.record:
            record("price", values, quick=quick, name="scripts", settings={"rounds": rounds, **asdict(work)})
        return 0 if report(values, SCRIPTS_REACHES) or quick else 1
    if args.watched:
        values = watched_figures(interleave(watched_cases(work), rounds=rounds)) | {**starts(), **storm_figures()}
        if args.record:
            record("price", values, quick=quick, name="watched", settings={"rounds": rounds, **asdict(work)})
        return 0 if report(values, WATCHED_REACHES) or quick else 1
    found = interleave(cases(work), rounds=rounds)
    values = figures(found)
    settings = {"rounds": rounds, **asdict(work), "run_length": RUN_LENGTH, "lean_run_length": LEAN_RUN_LENGTH}
    if args.record:
        record("price", values, quick=quick, settings=settings)
    if args.record and not quick:
        times = {name: [run.step_s for run in runs] for name, runs in found.items()}
        bars(ROOT / "experiments/price/results/steps.png", times, label="seconds per step", title="One step of tiny")
    met = report(values, REACHES)
    return 0 if met or quick else 1


if __name__ == "__main__":
    sys.exit(main())
