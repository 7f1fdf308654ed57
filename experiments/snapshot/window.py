"""The window without redundancy: how long after a node's loss every shard has its holders again, and what it costs.

Four members on three simulated nodes; the node with two of them is killed from outside in the middle of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastrain.launcher.simulated.embedded_etcd import EmbeddedEtcd
from experiments.harness import ROOT
from experiments.journals import Line, Run, Tail, read_run

SCRIPT = Path(__file__).with_name("window_train.py")
WORKERS = {"a": 1, "b": 1, "c": 2}
VICTIM = "c"
WAIT_S = 0.22
"""With what a micro-batch computes, four of them are a step of about a second, for 252 MB of optimizer state."""
KILLED_IN, STEPS, QUICK_STEPS = 4, 14, 9
TIMEOUT_S = 240.0
LOOK_EVERY_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What processes have had of the processors until `at_s`, in seconds, all threads together."""

    at_s: float
    ran_s: float
    queued_s: float
    """Ready to run, and no core was free."""


class Watch(threading.Thread):
    """Looks at processes every now and then: the kernel counts what each thread has had, and how long it has waited."""

    def __init__(self, pids: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self.found: list[Spent] = []
        self._pids = pids

    def run(self) -> None:
        while tasks := [task for pid in self._pids for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]:
            with suppress(OSError):  # a thread that has ended since is left out of the next look
                counted = [task.read_text().split() for task in tasks]
                ran_ns, queued_ns = (sum(int(fields[place]) for fields in counted) for place in (0, 1))
                self.found.append(Spent(at_s=time.monotonic(), ran_s=ran_ns / 1e9, queued_s=queued_ns / 1e9))
            time.sleep(LOOK_EVERY_S)


@dataclass(frozen=True, kw_only=True)
class Course:
    """A job whose node was killed at `killed_s`, and the journals of those that were left."""

    run: Run
    windows: list[Line]
    killed_s: float
    survivors: tuple[str, ...]
    spent: list[Spent]
    """Of the survivors, from the loss on."""


def measure(folder: Path, *, backups: int = 1, quick: bool = False) -> dict[str, Any]:
    """`window_steps`, `window_slowdown` and what they are made of. Raises RuntimeError where the job ended badly."""
    arguments = ("--backups", str(backups), "--wait-s", str(WAIT_S))
    course = play(folder, steps=QUICK_STEPS if quick else STEPS, arguments=arguments)
    ends = _step_ends(course)
    after = {step: ends[step] - ends[step - 1] for step in sorted(ends) if step - 1 in ends and step > KILLED_IN}
    closing = max((line for line in course.windows if not line["short"]), key=lambda line: line["t"])
    closed_s, last_step = closing["t"], closing["step"] - 1  # told with the commit of the step before the open one
    within = [step for step in after if ends[step - 1] < closed_s]
    beyond = [step for step in after if ends[step - 1] >= closed_s]
    inside = [after[step] for step in within]
    usual_s = statistics.median(after[step] for step in beyond)
    return {
        "window_s": closed_s - course.killed_s,
        # In steps of the job: the interrupted one counts by what was left of it when the node was lost.
        "window_steps": 1 - _phase(course, ends) + last_step - KILLED_IN,
        # The same as time, in steps of those who are left: it has detection, recovery and the lost runs in it, too.
        "window_in_step_times": (closed_s - course.killed_s) / usual_s,
        "window_slowdown": statistics.mean(inside) / usual_s if inside else 1.0,
        "window_step_s": usual_s,
        "interrupted_step_s": ends[KILLED_IN] - ends[KILLED_IN - 1],
        "steps_inside": len(inside),
        # What slows steps down: work of the members' own, or cores that others have. Per step of all survivors.
        **{f"window_{name}": value for name, value in _per_step(course.spent, ends, within).items()},
        **{f"usual_{name}": value for name, value in _per_step(course.spent, ends, beyond).items()},
    }


def _per_step(spent: Sequence[Spent], ends: dict[int, float], steps: Sequence[int]) -> dict[str, float]:
    """Means over these steps, in seconds; nothing where there are none."""
    if not steps:
        return {}
    pairs = [(_at(spent, ends[step - 1]), _at(spent, ends[step])) for step in steps]
    return {
        "processor_s": statistics.mean(after.ran_s - before.ran_s for before, after in pairs),
        "queued_s": statistics.mean(after.queued_s - before.queued_s for before, after in pairs),
    }


def _at(spent: Sequence[Spent], at_s: float) -> Spent:
    return min(spent, key=lambda each: abs(each.at_s - at_s))


def _phase(course: Course, ends: dict[int, float]) -> float:
    """How far the interrupted step was, from 0 to 1, by the one before it."""
    before_s = ends[KILLED_IN - 1] - ends[KILLED_IN - 2]
    return min(1.0, (course.killed_s - ends[KILLED_IN - 1]) / before_s)


def _step_ends(course: Course) -> dict[int, float]:
    """Step -> when the last survivor went on to the next one."""
    members = [course.run.members[name] for name in course.survivors]
    steps = set.intersection(*(set(member.advanced_s) for member in members))
    return {step: max(member.advanced_s[step] for member in members) for step in steps}


def play(folder: Path, *, steps: int, arguments: Sequence[str]) -> Course:
    """Run the job, and kill the node in it. `arguments`: of the script."""
    folder.mkdir(parents=True)
    arguments = ("--steps", str(steps), *arguments)
    with ExitStack() as stack:
        etcd = EmbeddedEtcd(folder / "etcd", host="127.0.0.1")
        stack.callback(etcd.close)
        jobs = {name: stack.enter_context(node(folder, name, etcd.endpoint, arguments)) for name in WORKERS}
        killed_s = _kill(folder, jobs[VICTIM])
        watch = Watch([pid for name in set(WORKERS) - {VICTIM} for pid in read_run(folder / name).pids.values()])
        watch.start()
        for name in set(jobs) - {VICTIM}:
            if jobs[name].wait(TIMEOUT_S) != 0:
                raise RuntimeError(f"node {name} ended badly: {(folder / f'{name}.log').read_text()[-2000:]}")
    run, windows, survivors = Run(), [], []
    for name in set(WORKERS) - {VICTIM}:
        here = read_run(folder / name)
        for member in here.pids:
            run.members[member] = here.members[member]
            survivors.append(member)
            lines = Tail(folder / name / "members" / f"{member}.jsonl").read()
            windows += [line for line in lines if line["event"] == "window"]
    return Course(run=run, windows=windows, killed_s=killed_s, survivors=tuple(survivors), spent=watch.found)


@contextmanager
def node(
    folder: Path, name: str, endpoint: str, arguments: Sequence[str], options_of_job: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """One node's agent with its workers, ended when the block is left; its output goes to `NAME.log` in `folder`."""
    options = ["--nnodes", str(len(WORKERS)), "--node-name", name, "--nproc-per-node", str(WORKERS[name])]
    options += ["--rdzv-endpoint", endpoint, "--rdzv-id", f"window-{os.getpid()}", "--max-restarts", "0"]
    options += ["--run-dir", str(folder / name), "--secret-file", str(_secret(folder))]
    command = [sys.executable, "-m", "elastrain.launcher", "run", *options, *options_of_job, str(SCRIPT), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(30)


def _secret(folder: Path) -> Path:
    path = folder / "secret"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text("a secret of this experiment alone\n")
    return path


def _kill(folder: Path, agent: subprocess.Popen[bytes]) -> float:
    """In the middle of the step, every process of the node at once. When that was, in monotonic seconds."""
    tail = None
    until_s = time.monotonic() + TIMEOUT_S
    step_s: list[float] = []
    while time.monotonic() < until_s:
        pids = read_run(folder / VICTIM).pids if (folder / VICTIM / "events.jsonl").exists() else {}
        if pids and tail is None:
            tail = Tail(folder / VICTIM / "members" / f"{min(pids)}.jsonl")
        lines = tail.read() if tail is not None else []
        step_s += [line["t"] for line in lines if line["event"] == "advance"]
        if len(step_s) >= KILLED_IN:
            time.sleep((step_s[-1] - step_s[-2]) / 2)
            for pid in (agent.pid, *pids.values()):
                os.kill(pid, signal.SIGKILL)
            return time.monotonic()
        time.sleep(0.02)
    raise RuntimeError(f"nobody came to step {KILLED_IN}: {(folder / f'{VICTIM}.log').read_text()[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backups", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer steps: figures of a few seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="elastrain-window-") as name:
        print(json.dumps(measure(Path(name) / "job", backups=args.backups, quick=args.quick)))


if __name__ == "__main__":
    main()
