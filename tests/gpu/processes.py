"""Processes with a time limit: one that does not end is killed with all that it started, and that is a result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "ELASTRAIN_TESTS_GPU"
"""Variable in the environment of all that one process starts; workers are in sessions of their own."""

_ENDED = threading.Event()


class EndedError(Exception):
    """A process that did not end well; the text says how."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that has ended with 0."""

    output: str
    seconds: float


def marked(mark: str) -> list[int]:
    """Return the ids of the processes whose mark begins so."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            if any(each.startswith(wanted) for each in variables):
                found.append(int(entry.name))
    return found


def kill(mark: str) -> None:
    """Kill all processes whose mark begins so, until none is left or two seconds have passed."""
    until_s = time.monotonic() + 2
    while (left := marked(mark)) and time.monotonic() < until_s:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def end(mark: str) -> None:
    """Kill all processes whose mark begins so, and let no other one begin."""
    _ENDED.set()
    kill(mark)


def run(
    name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str], *, limit_s: float, code: int = 0
) -> Ended:
    """Run a Python command (its arguments) to its end; its output goes to `output.txt` in the folder.

    Raises EndedError if it does not end within the limit, or not with `code`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark, began_s = f"{folder}/", time.monotonic()
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**environment, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        found: int | None = process.wait(timeout=0.0 if _ENDED.is_set() else max(limit_s, 0.0))
    except subprocess.TimeoutExpired:
        found = None
    finally:
        process.kill()  # one that has only just begun does not show its mark yet
        kill(mark)
    with suppress(subprocess.TimeoutExpired):  # a process in the driver cannot be killed: it is left behind
        process.wait(timeout=5)
    text = (folder / "output.txt").read_text(errors="replace")
    if found != code:
        how = f"was killed: not done within {limit_s:.0f} s" if found is None else f"ended with {found}"
        words = [line.strip() for line in text.splitlines() if line.strip(" ^~")]
        raise EndedError(f"{name} {how}; its last words: {' / '.join(words[-6:])[-900:]}")
    return Ended(output=text, seconds=time.monotonic() - began_s)
