"""Each variant in a process of its own, forked so that torch is imported once, and asked for one step at a time.

The parent computes nothing: a process that has started threads cannot be forked safely.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")
ANSWER_WITHIN_S = 150.0
END_WITHIN_S = 10.0


class Process:
    """`make(*given)` in a forked process; `ask(name)` calls the method of that name there."""

    def __init__(self, make: Callable[..., Any], *given: Any) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, given), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, name: str) -> Any:
        """What the method returned. Raises RuntimeError if the process ends or does not answer in time."""
        self.begin(name)
        return self.answer(name)

    def begin(self, name: str) -> None:
        """Let it call the method while others do the same. `answer` is to follow."""
        self._pipe.send(name)

    def answer(self, name: str) -> Any:
        """What the method that was begun returned. Raises as `ask`."""
        if not self._pipe.poll(ANSWER_WITHIN_S):
            raise RuntimeError(f"no answer to {name!r} within {ANSWER_WITHIN_S} s: use a smaller size")
        try:
            return self._pipe.recv()
        except EOFError as ended:
            raise RuntimeError(f"the process ended while it was asked for {name!r}: see its error above") from ended

    def close(self) -> None:
        """End it. Later processes have inherited this end of the pipe: closing it would say nothing."""
        self._pipe.send(None)
        self._pipe.close()
        self._process.join(END_WITHIN_S)
        if self._process.is_alive():
            self._process.kill()


class _Call:
    def __init__(self, function: Callable[..., T], *given: Any) -> None:
        self.call = lambda: function(*given)


def apart(function: Callable[..., T], *given: Any) -> T:
    """`function(*given)`, in a process of its own."""
    process = Process(_Call, function, *given)
    try:
        found: T = process.ask("call")
        return found
    finally:
        process.close()


def side_by_side(function: Callable[..., T], givens: Sequence[Any]) -> list[T]:
    """`function(given)` for each, apart, and as many at a time as there are cores: for what is not timed."""
    cores = len(os.sched_getaffinity(0))
    found: list[T] = []
    for start in range(0, len(givens), cores):
        processes = [Process(_Call, function, given) for given in givens[start : start + cores]]
        for process in processes:
            process.begin("call")
        try:
            found += [process.answer("call") for process in processes]
        finally:
            for process in processes:
                process.close()
    return found


def _serve(pipe: Connection, make: Callable[..., Any], given: tuple[Any, ...]) -> None:
    served = make(*given)
    while (name := pipe.recv()) is not None:
        pipe.send(getattr(served, name)())
