"""`elastrain chaos` beside a job, and what it has said so far: what struck, what did not, and whose bits flipped."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from elastrain.errors import ConfigError
from elastrain.launcher.faults import grammar

OTHERS = (
    "segfault",
    "abort",
    "exception",
    "device-error",
    "memory-limit",
    "out-of-memory",
    "hang",
    "stop",
    "slow",
    "throttle",
    "preempt",
    "flip",
    "etcd-kill",
    "etcd-stop",
    "etcd-compact",
    "etcd-wipe",
)
"""All that a job of several nodes in one network survives."""
CLASSES = ",".join(["kill"] * 7 + list(OTHERS))
"""For `--classes`: a third are kills, because most of what fails outside ends a process."""
HEARD_WITHIN_S = 2.0
"""A fault is read of so long after it struck, at the most."""


@dataclass(kw_only=True)
class Strikes:
    """What the command has said so far."""

    struck: list[str] = field(default_factory=list)
    """The lines of a schedule that replays them."""
    refused: list[str] = field(default_factory=list)
    """Sentences."""
    flipped_s: dict[str, float | None] = field(default_factory=dict)
    """Member -> when its first bit was to flip, at the latest."""

    def take(self, line: str, at_s: float) -> None:
        """One line of the command's output: a fault, or at the end the summary."""
        told = json.loads(line)
        if "number" not in told:
            return
        if not told["struck"]:
            self.refused.append(told["sentence"])
            return
        self.struck.append(told["line"])
        fault = grammar.parse(told["line"])
        if fault.kind == "flip":
            self.flipped_s.setdefault(fault.member, at_s - HEARD_WITHIN_S)

    def by_class(self) -> dict[str, int]:
        return dict(sorted(Counter(line.split()[0] for line in self.struck).items()))

    def by_refusal(self) -> dict[str, int]:
        """Why faults did not strike, without the fault: the commonest reasons first."""
        return dict(Counter(sentence.rpartition(": ")[2] for sentence in self.refused).most_common(5))


@dataclass(kw_only=True)
class ChaosCommand:
    """The command, running."""

    process: subprocess.Popen[bytes]
    said: Path
    strikes: Strikes = field(default_factory=Strikes)
    _read_bytes: int = 0

    def look(self) -> None:
        """Read what is new. Raises ConfigError if the command does not understand what it was asked."""
        if self.process.poll() == 2:
            raise ConfigError(self.said.with_suffix(".err").read_text())
        with self.said.open("rb") as file:
            file.seek(self._read_bytes)
            whole = file.read().rpartition(b"\n")[0]
        if whole:
            self._read_bytes += len(whole) + 1
            for line in whole.decode().splitlines():
                self.strikes.take(line, time.monotonic())

    def finish(self, timeout_s: float) -> None:
        """It ends when the job has ended. Raises subprocess.TimeoutExpired."""
        self.process.wait(timeout_s)
        self.look()


@contextmanager
def chaos(run: Path, said: Path, *, minutes: float, mtbf_s: float, seed: int) -> Iterator[ChaosCommand]:
    """Strike the job in the folder `run`; every line goes to `said`. Ended when the block is left."""
    command = [sys.executable, "-m", "elastrain.launcher", "chaos", "--json", "--run", str(run)]
    command += ["--seed", str(seed), "--mtbf", str(mtbf_s), "--for", f"{minutes}m", "--classes", CLASSES]
    with said.open("wb") as out, said.with_suffix(".err").open("wb") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors)
    try:
        yield ChaosCommand(process=process, said=said)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
