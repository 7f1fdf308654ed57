"""Processes with a deadline: what does not end is killed with all that it started. This module imports no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from experiments.storm.processes import MARK, Processes

_live: set[Processes] = set()
_over = threading.Event()


class Once:
    """Values that threads share, by keys. Each is made once: threads that ask for it meanwhile wait for it."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Future[Any]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key. Raises what `make` raised, for all that ask."""
        with self._lock:
            is_mine = key not in self._made
            made = self._made.setdefault(key, Future())
        if is_mine:
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)
                raise
        return made.result()


class EndedError(Exception):
    """A process that did not end well; the text says how."""


def end_all() -> None:
    """Kill the processes of everything that runs, and let nothing else begin."""
    _over.set()
    for processes in list(_live):
        processes.end()


def end_on_sigterm() -> None:
    """Leave by an exception when this program is ended, and leave no process of its jobs behind."""
    signal.signal(signal.SIGTERM, lambda number, _: (end_all(), sys.exit(128 + number)))


@contextmanager
def marked() -> Iterator[tuple[Processes, dict[str, str]]]:
    """Give the processes of one run, and the variable that marks them. They are killed when the block is left.

    Raises EndedError if this program is about to end.
    """
    if _over.is_set():
        raise EndedError("not begun: this program was ended")
    mark = uuid.uuid4().hex
    processes = Processes(mark)
    _live.add(processes)
    try:
        yield processes, {MARK: mark}
    finally:
        processes.end()
        _live.discard(processes)


def followed(
    process: subprocess.Popen[bytes],
    processes: Processes,
    deadline_s: float,
    *,
    look: Callable[[], bool] = lambda: False,
    at_deadline: Callable[[], None] = lambda: None,
) -> int | None:
    """Return the exit code of a process, or None if it was killed: by its deadline, or because `look` said so."""
    until_s = time.monotonic() + deadline_s
    while (code := process.poll()) is None:
        is_over = _over.is_set() or look()
        if not is_over and time.monotonic() > until_s:
            at_deadline()
            is_over = True
        if is_over:
            process.kill()  # one that has only just begun does not show its mark yet
            processes.end()
            with suppress(subprocess.TimeoutExpired):  # a process in a driver cannot be killed: it is left behind
                process.wait(timeout=5)
            return None
        time.sleep(0.1)
    return code


def run(name: str, command: Sequence[str], output: Path, *, deadline_s: float) -> str:
    """Run a Python command (its arguments), and return its output. Raises EndedError unless it ends well in time."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with marked() as (processes, variables), output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = followed(process, processes, deadline_s)
    text = output.read_text(errors="replace")
    if code != 0:
        how = f"was killed: not done within {deadline_s:.0f} s" if code is None else f"ended with {code}"
        raise EndedError(f"{name} {how}; its last words: {last_words(text)}")
    return text


def last_words(output: str) -> str:
    """Return the end of an output, on one line."""
    words = [line.strip() for line in output.splitlines() if line.strip(" ^~")]
    return " / ".join(words[-6:])[-900:]
