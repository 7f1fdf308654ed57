"""Five public training programs, ported: are their bits, logs, checkpoints and evaluations kept through kills?

Each program trains alone and in a job in which three workers are killed, and then goes on from its own checkpoint,
alone and in a job in which rank 0 is killed.
"""

from __future__ import annotations

import csv
import difflib
import functools
import json
import math
import operator
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from elastrain.runtime.loggers.wandb_run import _records
from experiments.adoption.programs.models import write_text
from experiments.jobs import Script, alone, elastic, finish
from experiments.journals import Follower, Run, read_member, read_run

PROGRAMS = Path(__file__).with_name("programs")
MEMBERS, TIMEOUT_S, STEPS, MORE_STEPS = 4, 420.0, 48, 80
TIMES = ("runtime", "per_second", "hparams", "hp_metric")
"""Ends of the names of logged values that differ between two runs of one program."""
Row = tuple[str, str, int]
"""A file, a name in it, and the step of a value."""


@dataclass(frozen=True)
class Program:
    """A program, how it is told to go on, and where it leaves what."""

    name: str
    lines: int
    """New lines that a port may have."""
    resume: tuple[str, ...]
    """Arguments of the run that goes on from the checkpoint of the first one."""
    checkpoint: str
    state: tuple[str | int, ...]
    """Keys of the optimizer's state in the checkpoint."""
    logs: Mapping[str, str]
    """Folder or file -> its kind, one of READERS."""
    accuracy: str = ""
    """Name of the logged accuracy, if the program has one."""
    rounding: float = 0.0
    """Relative difference of logged values that the program itself adds up in another order on each member."""

    def until(self, steps: int) -> tuple[str, ...]:
        """Return the arguments of a run of so many steps."""
        return (f"--max_iters={steps}",) if self.name == "nanogpt" else ("--epochs", str(steps // 8))


RESUME, OUT, LIT = "--resume_from_checkpoint", "out/checkpoint-48", "logs/lightning_logs"
BOARD, WANDB, TABLE = "tensorboard", "wandb", "csv"
_NLP, _TRAINER = {"logs/nlp": BOARD, "logs/wandb": WANDB}, {"out/runs": BOARD, "out/wandb": WANDB}
_LIT = {f"{LIT}/tb": BOARD, f"{LIT}/csv/metrics.csv": TABLE}
_LAST = "kept/last.ckpt"
FIVE = (
    Program("nanogpt", 15, ("--init_from=resume",), "out/ckpt.pt", ("optimizer",), {"wandb": WANDB}),
    Program("classifier", 12, ("--resume", "checkpoint.pt"), "checkpoint.pt", ("optimizer",), {"runs": BOARD}, "acc1"),
    Program("nlp", 3, (RESUME, "epoch_5"), "epoch_5/optimizer.bin", (), _NLP, "accuracy", 1e-6),
    Program("trainer", 3, (RESUME, OUT), f"{OUT}/optimizer.pt", (), _TRAINER, "eval/accuracy"),
    Program("lit", 3, ("--ckpt_path", _LAST), _LAST, ("optimizer_states", 0), _LIT, "train_acc_step"),
)


# ---- Ports and their files ----


def port(program: Program, folder: Path) -> int:
    """Write the ported program and what it reads into the folder, and return the number of its new lines.

    Lines that are only indented otherwise are not new.
    """
    folder.mkdir(parents=True)
    shutil.copy(PROGRAMS / "models.py", folder)
    script = Path(shutil.copy(PROGRAMS / f"{program.name}.py", folder))
    before = script.read_text()
    subprocess.run(["git", "apply", "--unidiff-zero", PROGRAMS / f"{program.name}.diff"], cwd=folder, check=True)
    write_text(folder)
    lines = [[line.strip() for line in text.splitlines() if line.strip()] for text in (before, script.read_text())]
    steps = difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes()
    return sum(to - at for kind, _, _, at, to in steps if kind != "equal")


def tensorboard(folder: Path) -> Iterator[tuple[str, int, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    for name in read.Tags()["scalars"]:
        yield from ((name, event.step, event.value) for event in read.Scalars(name))


def wandb(folder: Path) -> Iterator[tuple[str, int, Any]]:
    from wandb.proto import wandb_internal_pb2 as messages

    runs: dict[str, int] = {}  # a program that goes on from its own checkpoint begins another run
    for path in sorted(folder.glob("offline-run-*/*.wandb")):
        for _, payload in _records(path.read_bytes()):
            record = messages.Record.FromString(payload)  # type: ignore[attr-defined]
            if record.run.run_id:
                number = runs.setdefault(record.run.run_id, len(runs))
            if record.WhichOneof("record_type") == "history":
                for item in record.history.item:
                    name = item.key or ".".join(item.nested_key)
                    yield f"run {number}: {name}", record.history.step.num, json.loads(item.value_json)


def table(path: Path) -> Iterator[tuple[str, int, Any]]:
    with path.open() as file:
        for row in csv.DictReader(file):
            yield from ((name, int(row["step"]), value) for name, value in row.items() if name != "step" and value)


READERS = {BOARD: tensorboard, WANDB: wandb, TABLE: table}


def logged(program: Program, folder: Path) -> list[tuple[Row, Any]]:
    """Return all values in the program's logs, as the loggers' own readers find them."""
    found = []
    for place, kind in program.logs.items():
        with suppress(FileNotFoundError):
            for name, step, value in READERS[kind](folder / place):
                if not name.endswith(TIMES) and ": _" not in name:
                    found.append(((place, name, step), value))
    return found


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return set(one) == set(other) and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


# ---- Runs ----


@dataclass(eq=False)
class Killer(threading.Thread):
    """Kills members of a job: "first" is the one of rank 0, "newest" the one that joined last.

    Training waits from each kill until the newcomer has joined and has passed a step.
    """

    folder: Path
    victims: Sequence[str]
    after: int
    """Steps that are committed before the first kill."""
    killed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def run(self) -> None:
        follower = Follower(self.folder / "run")
        until_s, after = time.monotonic() + TIMEOUT_S, self.after
        for victim in self.victims:
            while (member := self._found(follower.look(), victim, after)) is None:
                if time.monotonic() > until_s:
                    return
                time.sleep(0.05)
            (self.folder / "hold").touch()
            os.kill(follower.run.pids[member], signal.SIGKILL)
            self.killed.append(member)
            after = 0
        while self._found(follower.look(), "newest", 0) is None and time.monotonic() < until_s:
            time.sleep(0.05)
        (self.folder / "hold").unlink(missing_ok=True)

    def _found(self, run: Run, victim: str, after: int) -> str | None:
        """Return the member to kill, once as many members as ever compute, and all hold each other's copies."""
        members = [] if not run.views else list(run.views[-1].members)
        if len(members) < min(MEMBERS, len(run.members)) or set(members) & set(self.killed) or not members:
            return None
        passed = [run.members[name].passed for name in members]
        if min(map(len, passed)) < 2 or max(steps[-1].step for steps in passed) < after:
            return None
        (self.folder / "hold").unlink(missing_ok=True)
        return members[0] if victim == "first" else max(members, key=lambda name: int(name[1:]))


@dataclass(frozen=True, kw_only=True)
class Ran:
    digests: set[str]
    logs: list[tuple[Row, Any]]
    forwards: list[int]
    """Forwards in evaluations, by process."""


def run(program: Program, folder: Path, arguments: tuple[str, ...], victims: Sequence[str] = (), after: int = 3) -> Ran:
    """Run the ported program alone, or in a job in which members are killed."""
    script = Script(path=folder / f"{program.name}.py", args=arguments)
    forwards = folder / "forwards"
    shutil.rmtree(forwards, ignore_errors=True)
    forwards.mkdir()
    shutil.rmtree(folder / "run", ignore_errors=True)
    start: Any = functools.partial(subprocess.Popen, cwd=folder)
    os.environ["WANDB_MODE"] = "offline"
    if not victims:
        with alone(folder / "run", script, start=start) as process:
            finish(process, folder / "run", timeout_s=TIMEOUT_S)
        digests = {str(read_member(folder / "run").digest)}
    else:
        killer = Killer(folder, victims, after)
        with elastic(folder / "run", script, members=MEMBERS, start=start) as process:
            killer.start()
            finish(process, folder / "run", timeout_s=TIMEOUT_S)
        if len(killer.killed) < len(victims):
            raise RuntimeError(f"{program.name} ended after {len(killer.killed)} of {len(victims)} kills")
        digests = {member.digest for member in read_run(folder / "run").members.values() if member.digest}
    counts = [path.stat().st_size for path in forwards.iterdir()]
    return Ran(digests=digests, logs=logged(program, folder), forwards=counts)


def state_of(program: Program, folder: Path) -> Any:
    return functools.reduce(
        operator.getitem, program.state, torch.load(folder / program.checkpoint, weights_only=False)
    )


def program_figures(program: Program, folder: Path) -> dict[str, Any]:
    """Return the rows of one program."""
    places = [folder / program.name / kind for kind in ("alone", "killed")]
    changed, _ = (port(program, place) for place in places)
    kills: Sequence[Sequence[str]] = ((), ("first", "newest", "first"))
    firsts = [run(program, place, program.until(STEPS), who) for place, who in zip(places, kills, strict=True)]
    states = [state_of(program, place) for place in places]
    kept: dict[str, bool] = {
        "optimizer in checkpoints": bool(states[0]["state"]) and is_equal(*states),
        "shared evaluation": max(firsts[1].forwards) < 0.75 * sum(firsts[0].forwards),
    }
    rows = [dict(ran.logs) for ran in firsts]
    if program.accuracy:
        values = [{row: value for row, value in each.items() if row[1] == program.accuracy} for each in rows]
        kept["accuracy"] = bool(values[0]) and values[0] == values[1]
    gaps, repeats = missing(program, *rows), repeated(firsts[1].logs)
    try:
        later: Sequence[Sequence[str]] = ((), ("first",))
        again = (*program.until(MORE_STEPS), *program.resume)
        seconds = [run(program, place, again, who, 20) for place, who in zip(places, later, strict=True)]
    except RuntimeError as error:
        print(error)
        kept["resume"] = False
        seconds = []
    else:
        kept["resume"] = len(seconds[0].digests | seconds[1].digests) == 1
        gaps += missing(program, *(dict(ran.logs) for ran in seconds))
        repeats += repeated(seconds[1].logs)
        for place, kind in program.logs.items():
            if kind == BOARD:  # one folder of both runs
                steps = {step for (at, name, step), _ in seconds[1].logs if at == place and "loss" in name}
                gaps += MORE_STEPS - len(steps)
    kept["one logger without gaps"] = not gaps and not repeats
    lacking = sorted(name for name, is_kept in kept.items() if not is_kept)
    digests = firsts[0].digests | firsts[1].digests
    return {
        "changed_lines": changed,
        "digest_equal": len(digests) == 1,
        "log_gaps": gaps,
        "log_repeats": repeats,
        "given_up": len(lacking),
        "lacking": lacking,
    }


def missing(program: Program, wanted: Mapping[Row, Any], found: Mapping[Row, Any]) -> int:
    """Count the values that are missing in a log, or are others."""
    lacking = {row for row, value in wanted.items() if not _is_same(value, found.get(row), program.rounding)}
    for row in sorted(lacking)[:5]:
        print(f"  lacking: {row}: {wanted[row]}, found {found.get(row)}")
    return len(lacking)


def _is_same(one: Any, other: Any, rounding: float) -> bool:
    return bool(
        one == other
        or (isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=rounding))
    )


def repeated(rows: Sequence[tuple[Row, Any]]) -> int:
    """Count the values that a log has more than once."""
    twice = {row: count - 1 for row, count in Counter(row for row, _ in rows).items() if count > 1}
    for row in sorted(twice)[:5]:
        print(f"  repeated: {row}")
    return sum(twice.values())
