"""Numbers that a script's loop keeps between steps without `job.register`, such as a count of samples.

A member that joins later begins with other values of these numbers. They are looked at in the frame of the loop: its
variables, the globals of its module, and one level below them. Nothing is written there.
"""

from __future__ import annotations

import dis
import inspect
import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CodeType, FrameType

import numpy as np
from torch import nn

Number = int | float
_NUMBERS = frozenset((int, float, *(np.dtype(code).type for code in "bBhHiIlLqQefd")))
_LOOKED_INTO = 64
"""Items; a larger dict is not looked into."""
_CLOCK_S = 3_600.0
"""A fraction that a clock showed within this time is taken for a time."""


class LoopNumbers:
    """The numbers of one loop. The main thread looks before a step's micro-batches, and behind them.

    A number that changes while micro-batches are computed belongs to this member, and is left alone.
    """

    def __init__(self, registered: Iterable[object]) -> None:
        self._registered = {id(thing) for thing in registered}
        self._loop: CodeType | None = None
        self._reset: Collection[str] = ()
        self._last: dict[str, Number] = {}
        self._changed: set[str] = set()
        self._own: set[str] = set()

    def look(self, *, within: bool = False) -> None:
        """Note what has changed since the last look. `within`: micro-batches were computed since then."""
        now = self._numbers()
        changed = changes(self._last, now)
        (self._own if within else self._changed).update(changed)
        self._last = now

    def told(self) -> dict[str, Number]:
        """Return the numbers that newcomers should have, by name."""
        clocks = time.time(), time.monotonic(), time.perf_counter(), time.process_time()
        names = sorted(self._changed - self._own)
        found = ((name, _plain(self._last[name])) for name in names if name in self._last)
        return {name: value for name, value in found if math.isfinite(value) and not is_time(value, clocks)}

    def difference(self, told: Mapping[str, Number]) -> str:
        """Return a sentence if the job has other numbers than this member at its first step, else ""."""
        mine = self._numbers()
        differ = [name for name, value in told.items() if mine.get(name, value) != value]
        if not differ:
            return ""
        each = ", ".join(f"{name!r} is {mine[name]:g} here and {told[name]:g} in the job" for name in differ[:3])
        more = f" (and {len(differ) - 3} more)" if len(differ) > 3 else ""
        return (
            f"the loop keeps numbers that a member which begins later does not get: {each}{more}; keep such a number "
            'in a dict, and call job.register("numbers", numbers) before the loop'
        )

    def _numbers(self) -> dict[str, Number]:
        frame = self._frame()
        return {} if frame is None else dict(numbers_in(frame, self._registered, self._reset))

    def _frame(self) -> FrameType | None:
        """Return the frame whose loop goes over the steps, seen from a call below it."""
        frame: FrameType | None = sys._getframe(1)
        if self._loop is None:
            frame = loop_of(frame)
            if frame is not None:
                self._loop, self._reset = frame.f_code, set_first(frame.f_code, frame.f_lasti)
        while frame is not None and frame.f_code is not self._loop:
            frame = frame.f_back
        return frame


def loop_of(frame: FrameType | None) -> FrameType | None:
    """Return the first frame from here on that is no generator's and not of this package."""
    ours = ("elastrain.runtime.", "elastrain.integrations.")
    while frame is not None and (frame.f_code.co_flags & inspect.CO_GENERATOR or _module_of(frame).startswith(ours)):
        frame = frame.f_back
    return frame


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def numbers_in(frame: FrameType, registered: Collection[int], reset: Collection[str]) -> Iterator[tuple[str, Number]]:
    """Yield the numbers of a loop's frame by name, such as `seen`, `counts['seen']` or `self.seen`.

    Objects are looked into if their class is defined beside the loop or in the script.

    Args:
        frame: Frame of the loop.
        registered: Ids of objects to leave out.
        reset: Names of variables to leave out.
    """
    mine = {_module_of(frame), "__main__"}
    for name, value in {**frame.f_globals, **frame.f_locals}.items():
        kind = type(value)
        if name in reset:
            continue
        if kind in _NUMBERS:
            yield name, value
        elif issubclass(kind, dict):
            if len(value) <= _LOOKED_INTO and id(value) not in registered:
                yield from ((f"{name}[{key!r}]", its) for key, its in list(value.items()) if type(its) in _NUMBERS)
        elif kind.__module__ in mine and id(value) not in registered and not issubclass(kind, nn.Module):
            its_own = list(getattr(value, "__dict__", {}).items())
            yield from ((f"{name}.{key}", its) for key, its in its_own if type(its) in _NUMBERS)


def _plain(value: Number) -> Number:
    return value.item() if isinstance(value, np.generic) else value


def set_first(code: CodeType, at: int) -> set[str]:
    """Return the variables that a loop's body sets before it reads them. `at`: offset of the loop's own instruction."""
    instructions = [each for each in dis.get_instructions(code) if each.offset >= at]
    end = instructions[0].argval if instructions and instructions[0].opname == "FOR_ITER" else math.inf
    first: dict[str, str] = {}
    for each in instructions:
        if each.offset >= end:
            break
        kinds = [part for part in each.opname.split("_") if part in ("LOAD", "STORE", "DELETE")]
        if kinds and each.opname.rpartition("_")[2] in ("FAST", "NAME", "GLOBAL", "DEREF", "CHECK", "BORROW"):
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            for kind, name in zip(kinds, names, strict=False):
                first.setdefault(name, kind)
    return {name for name, kind in first.items() if kind == "STORE"}


def changes(before: Mapping[str, Number], now: Mapping[str, Number]) -> set[str]:
    """Return the names that have another value now. New names, and those that are NaN now, have not changed."""
    return {name for name, value in now.items() if before.get(name, value) != value and value == value}


def is_time(value: Number, clocks: Iterable[float]) -> bool:
    """Return True if one of the clocks has shown this number of seconds, or as an integer of nanoseconds, lately."""
    seconds = value if isinstance(value, float) else value / 1e9
    return seconds % 1 != 0 and any(clock - _CLOCK_S <= seconds <= clock and seconds > 1 for clock in clocks)
