"""Runs real training jobs for tests: `elastrain run` with faults, or the undisturbed job of one."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import warm
from tests.support.shared import once
from tests.support.sources import ROOT

SCRIPTS = ROOT / "tests/integration/scripts"
SCRIPT = SCRIPTS / "small_training.py"
PRECISION = SCRIPTS / "precision_training.py"
TIMEOUT_S = 500.0


@dataclass(frozen=True)
class Run:
    exit_code: int
    output: str
    folder: Path

    @property
    def events(self) -> list[dict[str, Any]]:
        return _lines(self.folder / "events.jsonl")

    @property
    def journals(self) -> dict[str, list[dict[str, Any]]]:
        return {path.stem: _lines(path) for path in sorted((self.folder / "members").glob("*.jsonl"))}

    @property
    def digests(self) -> dict[str, str]:
        """Member -> digest of its parameters at the end."""
        return {m: e["digest"] for m, events in self.journals.items() for e in events if e["event"] == "finished"}

    def phases_struck(self) -> list[tuple[str, int, str]]:
        """(member, step, phase) of the faults that struck from inside."""
        return [
            (m, e["step"], e["phase"]) for m, events in self.journals.items() for e in events if e["event"] == "fault"
        ]

    def fingerprints(self) -> dict[int, set[tuple[int, int]]]:
        """Committed step -> what members say of its samples: (count, fingerprint)."""
        told: dict[int, set[tuple[int, int]]] = {}
        for events in self.journals.values():
            for e in events:
                if e["event"] == "passed":
                    told.setdefault(e["step"], set()).add((e["samples"], e["fingerprint"]))
        return told


def _lines(path: Path) -> list[dict[str, Any]]:
    """Those that are whole: the last one may just be being written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ELASTRAIN_")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **extra}


def run_job(
    folder: Path,
    *,
    workers: int,
    arguments: Sequence[str],
    faults: Sequence[str] = (),
    options: Sequence[str] = (),
    script: Path = SCRIPT,
    slow_until: str | None = None,
    **inherited: str,
) -> Run:
    """One `elastrain run` to its end. `faults`: lines as after `elastrain inject`. `slow_until`: a member that the
    script's micro-batches wait for, so that it finds something left to join. `inherited`: its environment besides."""
    command = [sys.executable, "-m", "elastrain.launcher", "run", "--nproc-per-node", str(workers), *options]
    if faults:
        plan = folder / "faults.txt"
        plan.write_text("\n".join(faults) + "\n")
        command += ["--faults", str(plan)]
    command += ["--run-dir", str(folder / "run"), str(script), *arguments]
    if slow_until is not None:
        slow = folder / "slow"
        slow.touch()
        command += ["--slow-while", str(slow)]
        threading.Thread(target=_speed_up, args=(slow, folder / "run", slow_until), daemon=True).start()
    done = warm.run(command, env=environment(**inherited), capture_output=True, text=True, timeout=TIMEOUT_S)
    return Run(done.returncode, done.stdout + done.stderr, folder / "run")


def _speed_up(slow: Path, run: Path, member: str) -> None:
    """Let the micro-batches of a run go at their own pace once a view has the member."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        events = _lines(run / "events.jsonl")
        if any(e["event"] == "view" and member in e["members"] for e in events):
            break
        time.sleep(0.1)
    slow.unlink(missing_ok=True)


def undisturbed(*arguments: str, script: Path = SCRIPT) -> Run:
    """The same script alone under `python`: a job of one, which all tests that compare with it share."""
    return _alone(_that_count(arguments), script)


def _that_count(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Without the options that change nothing where nobody else is."""
    left = list(arguments)
    for option in ("--backups", "--audit"):
        if option in left:
            at = left.index(option)
            del left[at : at + 2]
    return tuple(left)


@functools.cache
def _alone(arguments: tuple[str, ...], script: Path) -> Run:
    def run(folder: Path) -> Run:
        done = warm.run(
            [sys.executable, str(script), *arguments],
            env=environment(ELASTRAIN_RUN_DIR=str(folder)),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        return Run(done.returncode, done.stdout + done.stderr, folder)

    return looked_at_by_many("\0".join((str(script), *arguments)), run)


def looked_at_by_many(name: str, run: Callable[[Path], Run]) -> Run:
    """What `run` leaves in the folder that it is given: made once for all processes of tests that name it."""

    def make(folder: Path) -> None:
        done = run(folder)
        ended = [done.exit_code, done.output, str(done.folder.relative_to(folder))]
        (folder / "ended.json").write_text(json.dumps(ended))

    folder = once(name, make)
    code, output, below = json.loads((folder / "ended.json").read_text())
    return Run(code, output, folder / below)


def assert_equal_to_undisturbed(run: Run, *arguments: str, script: Path = SCRIPT) -> None:
    """The one oracle: same digest on every member that reached the end, each sample in exactly one committed step."""
    alone = undisturbed(*arguments, script=script)
    assert alone.exit_code == 0, alone.output
    assert run.exit_code == 0, run.output
    assert set(run.digests.values()) == set(alone.digests.values()), (run.digests, alone.digests)
    assert run.fingerprints() == alone.fingerprints()
