"""Pipelines of any layout, with losses: bits, standstill, and how much of 1F1B's best is reached.

python -m experiments.pipeline.run [--quick] [--record]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from elastrain.pipeline.pipeline_plan import PipelinePlan
from experiments.harness import ROOT, Reach, add_record_flag, record, report
from experiments.jobs import Script, alone, elastic, finish, unwind_on_sigterm
from experiments.pipeline import gpt, hugging_face, migration, planner, train
from experiments.pipeline.against_torch import compared_times
from experiments.pipeline.figures import (
    actions,
    orphan_s,
    passed_s,
    plan_in_force,
    redone_ratio,
    samples_amiss,
    standstill_s,
    step_s,
)
from experiments.pipeline.plot import draw_beside, draw_step
from experiments.pipeline.steering import Steering
from experiments.pipeline.told import Told, journal, told
from tests.support import warm

WINDOW_MS, RUNS, STEPS = 40.0, 16, 3
"""A block's forward, and each half of its backward: 120 ms in all."""
MEMBERS = 4
WIDE, WIDE_STEPS, SETTLED = 1024, 20, 18
"""Where bytes are counted: blocks of 8 MiB, and from which step on, as states move to their members one by one."""
BYTES_RUNS = 4
WAIT_S = 240.0
LEAST = 10
"""The niceness of jobs whose bits alone matter, beside those whose times are taken."""
PICTURE = ROOT / "experiments/pipeline/results/step-with-a-loss.png"
BESIDE = ROOT / "experiments/pipeline/results/step-beside-its-prediction.png"
REACHES = {
    "steps_lost": Reach(limit=0),
    "samples_lost": Reach(limit=0),
    "samples_repeated": Reach(limit=0),
    "redone_ratio": Reach(limit=1.0),
    "standstill_s": Reach(limit=0.1),
    "orphan_s": Reach(limit=0.2),
    "schedule_efficiency": Reach(limit=0.93, at_least=True),
    "vs_torch_pipelining": Reach(limit=1.0),
    "bytes_ratio": Reach(limit=1.3),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A job: members, stages, and what its script is told besides."""

    members: int
    stages: int
    steps: int = 3
    micro_batches: int = 6
    args: tuple[str, ...] = ()
    window_ms: float = 0.0
    faults: tuple[str, ...] = ()
    plan: PipelinePlan | None = None
    """The plan that the job is told. None: it plans by itself."""

    @property
    def script(self) -> Script:
        told = ("--steps", str(self.steps), "--micro-batches", str(self.micro_batches), *self.args)
        return Script(path=Path(train.__file__), args=told)

    @property
    def paced(self) -> Script:
        return Script(path=self.script.path, args=(*self.script.args, "--window-ms", str(self.window_ms)))


def beside(*command: Any, **how: Any) -> subprocess.Popen[bytes]:
    """Start a job that takes what others leave of the processors: paced ones leave nine tenths."""
    process = warm.Popen(*command, **how)
    os.setpriority(os.PRIO_PROCESS, process.pid, LEAST)  # before it starts its own
    return process


def at_once(*command: Any, **how: Any) -> subprocess.Popen[bytes]:
    """Start a paced job: where the kernel permits it, its members have a processor as soon as they wake up."""
    process = warm.Popen(*command, **how)
    # They sleep nine tenths of the time. A niceness is not enough: the kernel deals to sessions, and each job is one.
    with suppress(PermissionError):
        os.sched_setscheduler(process.pid, os.SCHED_RR, os.sched_param(1))  # before it starts its own
    return process


def reference(folder: Path, args: tuple[str, ...]) -> Told:
    """A job of one, which does not sleep: waiting changes no bit."""
    with alone(folder, Script(path=Path(train.__file__), args=args), start=beside) as process:
        finish(process, folder, timeout_s=WAIT_S)
    return told(folder)


def job(folder: Path, layout: Layout, *, kill: tuple[str, int] | None = None) -> Told:
    """Run it to its end. `kill`: (member, step) that gets SIGKILL from outside, in the middle of that step."""
    options = ["--stages", str(layout.stages)]
    if layout.faults:
        folder.mkdir(parents=True)
        (folder / "faults.txt").write_text("\n".join(layout.faults) + "\n")
        options += ["--faults", str(folder / "faults.txt")]
    script, killed_s = layout.paced, None
    if layout.plan is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_bytes(msgspec.json.encode(Steering(first=layout.plan)))
        script = replace(script, args=(*script.args, "--plan", str(folder / "plan.json")))
    start = at_once if layout.window_ms else beside
    with elastic(folder, script, members=layout.members, options=options, start=start) as process:
        if kill is not None:
            killed_s = _kill(folder, *kill)
        finish(process, folder, timeout_s=WAIT_S)
    found = told(folder)
    found.killed_s = killed_s
    return found


def _kill(folder: Path, member: str, step: int) -> float:
    """Strike once the member has computed some of the step."""
    its, events = folder / "members" / f"{member}.jsonl", folder / "events.jsonl"
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        lines = journal(its) if its.exists() else []
        if sum(line["event"] == "task" and line["step"] == step for line in lines) >= 6:
            started = next(e for e in journal(events) if e.get("event") == "worker_start" and e["member"] == member)
            killed_s = time.monotonic()
            os.kill(started["pid"], signal.SIGKILL)
            return killed_s
        time.sleep(0.01)
    raise RuntimeError(f"{member} did not come to step {step} in {WAIT_S:g} s")


def layouts(*, quick: bool) -> dict[str, Layout]:
    """Those whose bits are compared with a job of one, unpaced."""
    found = {
        "1+1+1+1": Layout(members=4, stages=1),
        "2+2": Layout(members=4, stages=2),
        "4": Layout(members=4, stages=4, args=("--run-length", "2")),
    }
    if quick:
        return found
    found |= {
        "3+2": Layout(members=5, stages=3),
        "2+2, bf16": Layout(members=4, stages=2, args=("--dtype", "bfloat16")),
        "3, checkpointed": Layout(members=3, stages=3, args=("--checkpointed",)),
        "two neighbours": Layout(
            members=4,
            stages=4,
            steps=5,
            args=("--backups", "2"),
            faults=tuple(f"kill --target member:{m} --at step=2,phase=forward" for m in ("m1", "m2")),
        ),
        "a whole pipeline": Layout(
            members=4,
            stages=2,
            steps=5,
            args=("--backups", "2"),
            faults=tuple(f"kill --target member:{m} --at step=2,phase=backward" for m in ("m2", "m3")),
        ),
    }
    # The place of who was lost is taken by a newcomer, which gets blocks as soon as it has voted.
    kill = "kill --target member:m1 --at step=2,phase=forward"
    found["a joiner"] = Layout(members=3, stages=3, steps=12, args=("--slow-until", "m3"), faults=(kill,))
    for phase in ("forward", "backward", "reduce", "commit", "publish"):
        for place in range(3):
            fault = f"kill --target member:m{place} --at step=2,phase={phase}"
            found[f"{phase} at place {place}"] = Layout(members=3, stages=3, steps=5, faults=(fault,))
    return found


class Experiment:
    """Keeps the references: many layouts have the same one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._references: dict[tuple[str, ...], Told] = {}
        self._lock = threading.Lock()
        self.differing: list[str] = []
        self.lost = self.repeated = 0

    def reference(self, layout: Layout) -> Told:
        return self.reference_of(layout.script.args)

    def reference_of(self, args: tuple[str, ...]) -> Told:
        with self._lock:
            if args not in self._references:
                self._references[args] = reference(self._folder / f"alone-{len(self._references)}", args)
            return self._references[args]

    def compared(self, name: str, layout: Layout, *, kill: tuple[str, int] | None = None) -> Told:
        """Run a job, compare each step's digest on each member with the job of one."""
        found = job(self._folder / name.replace(" ", "-"), layout, kill=kill)
        if not found.is_that_of(self.reference(layout)):
            self.differing.append(name)
        lost, repeated = samples_amiss(found.journals, layout.steps)
        self.lost += lost
        self.repeated += repeated
        sys.stderr.write(f"{name}: {'DIFFERS' if name in self.differing else 'equal'}\n")
        return found


def measure(folder: Path, *, quick: bool, picture: Path | None = None) -> dict[str, Any]:
    warm.import_too(hugging_face.modules())
    experiment = Experiment(folder)
    against = compared_times(folder)  # nothing runs beside it
    if not quick:
        # As torch has it: one sum of all micro-batches, in place.
        as_one = compared_times(folder / "as-one-sum", run_length=gpt.MICRO_BATCHES)
        against["vs_torch_pipelining_one_sum"] = as_one["vs_torch_pipelining"]
    with ThreadPoolExecutor(max_workers=1) as behind:
        bits = behind.submit(compared_bits, experiment, folder, quick=quick)
        timed = paced_times(experiment, picture)
        told = bits.result()
    return {
        "digest_equal": not experiment.differing,
        "differing": experiment.differing,
        "steps_lost": experiment.lost,
        "samples_lost": experiment.lost,
        "samples_repeated": experiment.repeated,
        **timed,
        **against,
        **told,
    }


def compared_bits(experiment: Experiment, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Jobs of which bits and bytes are compared, and no times: they run at a low priority."""
    for name, layout in layouts(quick=quick).items():
        experiment.compared(name, layout)
    return {**bytes_held(experiment), "hf_bits_equal": hf_bits_equal(folder)}


def paced_times(experiment: Experiment, picture: Path | None) -> dict[str, Any]:
    """Paced jobs: undisturbed, with a loss whose blocks others have, and with one whose blocks nobody else has."""
    paced = Layout(members=MEMBERS, stages=MEMBERS, steps=STEPS, micro_batches=RUNS, window_ms=WINDOW_MS)
    struck = replace(paced, stages=2)
    whole = experiment.compared("paced", paced)
    after = experiment.compared("paced, a loss", struck, kill=("m1", 2))
    orphaned = experiment.compared("paced, an only replica", paced, kill=("m1", 2))
    done = actions(after.journals)
    assert after.killed_s is not None
    if picture is not None:
        draw_step(picture, done, lost="m1", step=2, killed_s=after.killed_s)
    return {
        "redone_ratio": redone_ratio(done, step=2, lost="m1"),
        "standstill_s": standstill_s(done, ("m0", "m2", "m3"), after.killed_s, _passed_s(after, 2)),
        "orphan_s": orphan_s(orphaned.journals, step=2, lost="m1"),
        **_paced(whole),
    }


def bytes_held(experiment: Experiment) -> dict[str, float]:
    """Live tensors, between steps, of the member that holds most over a quarter of one worker's."""
    # The job is told an even plan. By what an unpaced job shows its planner would move blocks, and bytes with them.
    found, plan = {}, planner.ruled(MEMBERS, MEMBERS, BYTES_RUNS, is_split=False)
    for backups, key in enumerate(("bytes_ratio", "bytes_ratio_1")):
        args = ("--count-bytes", "--width", str(WIDE), "--backups", str(backups))
        layout = Layout(
            members=MEMBERS, stages=MEMBERS, steps=WIDE_STEPS, micro_batches=BYTES_RUNS, args=args, plan=plan
        )
        heaviest = experiment.compared(f"bytes, {backups} backups", layout).live_bytes
        one = experiment.reference(layout).live_bytes
        found[key] = max(heaviest[SETTLED:]) / (max(one[SETTLED:]) / MEMBERS)
        found["first_step_bytes_ratio"] = heaviest[0] / one[0]
    return found


def hf_bits_equal(folder: Path) -> bool | None:
    """Unmodified models on three members against one; None without `transformers`."""
    if importlib.util.find_spec("transformers") is None:
        return None
    differing = []
    for name in hugging_face.MODELS:
        script = Script(path=Path(hugging_face.__file__), args=(name, "--steps", "3"))
        one, cut = folder / f"{name}-alone", folder / name
        with alone(one, script, start=beside) as process:
            finish(process, one, timeout_s=WAIT_S)
        with elastic(cut, script, members=3, options=("--stages", "3"), start=beside) as process:
            finish(process, cut, timeout_s=WAIT_S)
        if not told(cut).is_that_of(told(one)):
            differing.append(name)
        sys.stderr.write(f"{name}: {'DIFFERS' if name in differing else 'equal'}\n")
    return not differing


def _passed_s(found: Told, step: int) -> float:
    return min(passed_s(lines).get(step, float("inf")) for lines in found.journals.values())


def _paced(found: Told) -> dict[str, Any]:
    # The job is over before the planner has measured: the plan in force is the rule's, with whole backwards.
    plan = plan_in_force(found.journals["m0"], STEPS - 1)
    case = planner.Case(name="", count=MEMBERS, plan=plan, window_s=WINDOW_MS / 1000)
    measured_s = statistics.median(step_s(lines) for lines in found.journals.values())
    over = statistics.mean(found.overshoots_s) / (WINDOW_MS / 1000)
    return {
        "schedule_efficiency": planner.modelled_s(case, planner.Costs()) / measured_s,
        "step_s": measured_s,
        "overshoot": over,
        "is_valid": over <= 0.02,
        "share_of_cores": sum(found.shares) / (os.cpu_count() or 1),
    }


def plans(*, quick: bool, keep: bool) -> int:
    """The rows of the planner: paced jobs three at a time, then those of torch, with nothing beside them."""
    with tempfile.TemporaryDirectory(prefix="elastrain-planner-") as name:
        experiment = Experiment(Path(name))

        def is_equal(args: tuple[str, ...], found: Told) -> bool:
            return found.is_that_of(experiment.reference_of(args))

        jobs = planner.Jobs(folder=Path(name), is_equal=is_equal, start=beside)
        draw = (lambda split, played: draw_beside(BESIDE, planner.drawn_actions(split), played)) if keep else None
        figures = planner.measure(jobs, draw, quick=quick) | compared_times(Path(name), turns=2 if quick else 4)
        if not quick:
            figures |= planner.fits_after_losses(Path(name), beside)
    if keep:
        record("pipeline", figures, quick=quick, settings={"planner": True, "window_s": planner.WINDOW_S})
    met = report(figures, planner.REACHES)
    return 0 if met and figures["digest_equal"] else 1


def migrations(*, quick: bool, keep: bool) -> int:
    """The rows of moves: nothing runs beside these jobs."""
    with tempfile.TemporaryDirectory(prefix="elastrain-moves-") as name:
        figures = migration.measure(Path(name), planner.migration_pairs(quick=quick), at_once)
    if keep:
        record("pipeline", figures, quick=quick, settings={"moves": True, "pause_s": migration.PAUSE_S})
    reaches = {row: planner.REACHES[row] for row in ("migration_stall_ratio", "migration_stall")}
    return 0 if report(figures, reaches) and figures["migration_digest_equal"] else 1


def main() -> int:
    unwind_on_sigterm()
    parser = argparse.ArgumentParser(prog="python -m experiments.pipeline.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three layouts, no losses but those of the paced jobs")
    parser.add_argument("--planner", action="store_true", help="what the planner's plans gain, and its predictions")
    parser.add_argument("--moves", action="store_true", help="how much longer steps get while blocks move")
    add_record_flag(parser)
    args = parser.parse_args()
    if args.moves:
        return migrations(quick=args.quick, keep=args.record)
    if args.planner:
        return plans(quick=args.quick, keep=args.record)
    with tempfile.TemporaryDirectory(prefix="elastrain-pipeline-") as folder:
        figures = measure(Path(folder), quick=args.quick, picture=PICTURE if args.record else None)
    if args.record:
        settings = {"window_ms": WINDOW_MS, "runs": RUNS, "steps": STEPS, "members": MEMBERS}
        record("pipeline", figures, quick=args.quick, settings=settings)
    met = report(figures, REACHES)
    return 0 if met and figures["digest_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
