"""The ways to run a program: their commands, their faults, and what came out."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.harness import ROOT
from experiments.programs.holding import Hold
from experiments.programs.train import STACKS_AFTER

TRAIN = ROOT / "experiments" / "programs" / "train.py"
WORLDS = ("plain", "within", "save")
"""Ways without a job."""
WAYS = (*WORLDS[:1], "one", "2", "3", "kill", "resume", "stages", *WORLDS[1:])
KILLED_IN = ("forward", "backward", "reduce", "commit", "apply", "publish")
KILL_STEPS = (1, 2, 3)
RESUME_STEP, EVERY = 6, 2
"""All members are killed in this step; a checkpoint comes after each second one."""
_PROGRESS = (
    r"elastrain: (job|generation|m\d+ ended|the script raised|there is no checkpoint|the checkpoint of)"
    "|DIGEST|BITS|SAYS"
)
"""Lines that tell how a job goes."""
Start = Callable[..., "subprocess.Popen[Any]"]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a run of a way has left."""

    code: int | None
    """None if it was still running at its deadline."""
    output: str
    faults: str = ""
    digests: tuple[str, ...] = field(init=False)
    bits: tuple[str, ...] = field(init=False)
    says: tuple[Mapping[str, Any], ...] = field(init=False)

    def __post_init__(self) -> None:
        for name, pattern in (("digests", r"^DIGEST (.*)$"), ("bits", r"^BITS (\w+)")):
            object.__setattr__(self, name, tuple(re.findall(pattern, self.output, re.M)))
        said = re.findall(r"^SAYS (.*)$", self.output, re.M)
        object.__setattr__(self, "says", tuple(json.loads(each) for each in said))

    @property
    def sentence(self) -> str:
        """The runtime's last sentence, without the place in the script; empty after a traceback or a good end."""
        if not self.code or "Traceback (most recent call last)" in self.output:
            return ""
        lines = [line for line in self.output.splitlines() if line.strip() and not re.match(_PROGRESS, line)]
        return re.sub(r"^(elastrain: )?(\S+\.py:\d+: )?", "", lines[-1]) if lines else ""

    @property
    def end(self) -> str:
        """The last line of the program's code and the last line of all; of a run that stood still, more."""
        said = [line for line in self.output.splitlines() if line.strip() and not re.match("DIGEST|BITS|SAYS", line)]
        if self.code is None:
            return "\n".join(line[:300] for line in said[-60:])
        places = [line.strip() for line in said if re.search(r'File ".*/experiments/programs/kinds/', line)]
        return "\n".join(line[:400] for line in (*places[-1:], *said[-1:]))


@dataclass(frozen=True, kw_only=True)
class Order:
    """A way of a program as a command: the options of its job, its faults, and what its members wait for."""

    workers: int
    options: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    hold: Hold = field(default_factory=Hold)


def order_of(name: str, way: str, run_folder: Path) -> Order:
    """Return how to start the job of a way. What is killed, where and when follows from the program's name."""
    if way == "kill":
        return _with_a_kill(random.Random(name), run_folder)
    if way == "resume":
        return _with_a_resume(random.Random(f"resume {name}"), run_folder)
    if way == "stages":
        return Order(workers=2, options=("--stages", "2"))
    return Order(workers=int(way))


def _with_a_kill(rng: random.Random, run_folder: Path) -> Order:
    """Two workers, one of which is lost; in every third job the one that takes its place is lost while it joins."""
    step, again = rng.choice(KILL_STEPS), rng.random() < 1 / 3
    faults = [f"kill --target member:m{rng.choice((0, 1))} --at step={step},phase={rng.choice(KILLED_IN)}"]
    waits = [(step + 1, _ready("m2"))]
    if again:
        faults.append("kill --target member:m2 --at phase=join")
        waits.append((step + 3, _ready("m3")))
    hold = Hold(events=str(run_folder / "events.jsonl"), members=2, waits=waits)
    return Order(workers=2, faults=tuple(faults), hold=hold)


def _ready(member: str) -> Sequence[str]:
    return f'"member":"{member}"', '"event":"ready"'


def _with_a_resume(rng: random.Random, run_folder: Path) -> Order:
    """One or two workers, all of which are killed in one step; the job goes on from its newest checkpoint."""
    workers, phase = rng.choice((1, 2)), rng.choice(KILLED_IN[:2])
    faults = tuple(f"kill --target member:m{i} --at step={RESUME_STEP},phase={phase}" for i in range(workers))
    hold = Hold(
        events=str(run_folder / "events.jsonl"), waits=((RESUME_STEP - 1, ('"reason":""', '"event":"checkpoint"')),)
    )
    checkpoints = ("--checkpoint-dir", str(run_folder.parent / "checkpoints"), "--checkpoint-every", str(EVERY))
    return Order(workers=workers, options=checkpoints, faults=faults, hold=hold)


def run_way(name: str, way: str, folder: Path, *, deadline_s: float, start: Start) -> Ran:
    """Run a program in one way in a folder of its own."""
    folder.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", STACKS_AFTER: str(deadline_s - 10)}
    command = [sys.executable, str(TRAIN), name, way if way in WORLDS else "job"]
    faults: tuple[str, ...] = ()
    if way not in (*WORLDS, "one"):
        order = order_of(name, way, folder / "run")
        faults = order.faults
        options = ["--nproc-per-node", str(order.workers), "--run-dir", str(folder / "run"), *order.options]
        if faults:
            (folder / "faults.txt").write_text("".join(f"{fault}\n" for fault in faults))
            options += ["--faults", str(folder / "faults.txt")]
        command = [sys.executable, "-m", "elastrain.launcher", "run", *options, *command[1:]]
        environment |= order.hold.told()
    elif way == "one":
        (folder / "run").mkdir()
        environment["ELASTRAIN_RUN_DIR"] = str(folder / "run")
    code = _run(command, folder, environment, deadline_s, start)
    output = (folder / "output.log").read_text(errors="replace")
    return Ran(code=code, output=output, faults="; ".join(faults))


def _run(command: list[str], folder: Path, environment: dict[str, str], deadline_s: float, start: Start) -> int | None:
    """Return the exit code, or None if the deadline came first. Nothing of the job is left."""
    with (folder / "output.log").open("wb") as file, open(os.devnull, "rb") as nothing:
        process = start(command, cwd=folder, env=environment, stdin=nothing, stdout=file, stderr=subprocess.STDOUT)
        try:
            return int(process.wait(timeout=deadline_s))
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(timeout=15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
