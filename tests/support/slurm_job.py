"""A job on a real Slurm: submitted by `elastrain launch slurm`, read by its folder, hit by what Slurm does to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.slurm import Slurm
from tests.support.training import SCRIPT
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]


class SlurmJob:
    """One submission. The script is slow until `hurry`."""

    def __init__(self, slurm: Slurm, folder: Path, *launch: str, steps: int, run: tuple[str, ...] = ()) -> None:
        self.slurm, self._parent = slurm, folder
        folder.mkdir(exist_ok=True)
        self._slow = folder / "slow"
        self._slow.touch()
        arguments = (*run, str(SCRIPT), "--steps", str(steps), "--slow-while", str(self._slow))
        self.number = submit(slurm, folder, *launch, "--", *arguments)

    @property
    def folder(self) -> Path:
        return self._parent / f"elastrain-slurm-{self.number}"

    def hurry(self) -> None:
        self._slow.unlink(missing_ok=True)

    def text(self) -> str:
        paths = sorted(self._parent.glob("slurm-*.out"))
        return "".join(path.read_text(errors="replace") for path in paths)

    def state(self) -> str:
        told = self.slurm.told("scontrol", "show", "job", self.number, "--oneliner").split()
        return next((word.partition("=")[2] for word in told if word.startswith("JobState=")), "")

    def events(self, event: str, *, start: int = 0, node: str = "*", **fields: Any) -> list[dict[str, Any]]:
        """Events of one start of the job by Slurm: the first, or after so many requeues."""
        found = []
        for path in sorted((self.folder / f"run-{start}").glob(f"{node}/events.jsonl")):
            lines = path.read_text().splitlines(keepends=True)
            events = [json.loads(line) for line in lines if line.endswith("\n")]
            found += [e | {"node_name": path.parent.name} for e in events if e["event"] == event]
        return [e for e in found if all(e.get(name) == value for name, value in fields.items())]

    def wait(self, event: str, timeout_s: float = 180.0, **fields: Any) -> dict[str, Any]:
        return until(lambda: self.events(event, **fields), timeout_s, f"{event} {fields}\n{self.text()}")[0]

    def wait_step(self, step: int, node: str, start: int = 0, timeout_s: float = 180.0) -> None:
        def reached() -> bool:
            told = self.folder / f"run-{start}" / node / "run.json"
            return told.exists() and (json.loads(told.read_text()).get("step") or -1) >= step

        until(reached, timeout_s, f"step {step}\n{self.text()}")

    def wait_end(self, timeout_s: float = 240.0) -> str:
        """The job's last state, once it is over."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        until(lambda: self.state() in over, timeout_s, f"the end of job {self.number}\n{self.text()}")
        return self.state()

    def digests(self, start: int = 0) -> set[str]:
        return {event["digest"] for event in self.events("finished", start=start)}

    def computing(self) -> list[str]:
        """Nodes with a worker that started in the first start of the job."""
        return sorted({event["node_name"] for event in self.events("worker_start")})


def submit(slurm: Slurm, folder: Path, *words: str) -> str:
    """Submit what `elastrain launch slurm` makes of these words. Returns the job's number."""
    done = subprocess.run(
        [sys.executable, "-m", "elastrain.launcher", "launch", "slurm", "--submit", *words],
        env=slurm.environment | {"PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.split("Slurm job ")[1].split()[0]
