"""Notes of where a micro-batch gets values besides its parameters and its batch, such as a clock or the rank."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np

from elastrain.integrity.bit_traces import ANYWHERE
from elastrain.runtime.ranks import Ranked

_CODE: dict[CodeType, str] = {
    type(os.environ).__getitem__.__code__: "environment",
    Ranked.rank.fget.__code__: "rank",  # type: ignore[attr-defined]
    Ranked.is_main.fget.__code__: "rank",  # type: ignore[attr-defined]
}
"""Function of Python -> the source that it reads."""
_CALLS = {"urandom": "entropy", "getpid": "environment", "gethostname": "environment"}
_CLOCKS = ("now", "utcnow", "today")
_SEEDED = random._inst
"""Python's default generator, which is seeded for each micro-batch."""


class ValueSources:
    """A profile function that notes sources of values, by the module that `place` names, while it is entered."""

    def __init__(self, place: Callable[[], str]) -> None:
        self._place = place
        self._found: dict[str, dict[str, None]] = {}
        self._before: Any = None
        self._states: dict[int, str] = {}

    def __enter__(self) -> ValueSources:
        self._states = _numpy_states()
        self._before = sys.getprofile()
        sys.setprofile(self._look)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)
        # Methods of NumPy's generators call no profile function. So their states are compared.
        if any(self._states.get(of, state) != state for of, state in _numpy_states().items()):
            self._found.setdefault(ANYWHERE, {})["numpy generator"] = None

    def by_module(self) -> dict[str, list[str]]:
        """Return module -> sources, in the order in which they were read first."""
        return {module: list(found) for module, found in self._found.items()}

    def _look(self, frame: Any, event: str, called: Any) -> None:
        source = _CODE.get(frame.f_code) if event == "call" else _called(called) if event == "c_call" else None
        if source is not None:
            self._found.setdefault(self._place(), {})[source] = None


def _called(function: Any) -> str | None:
    """Return the source that a builtin function reads, or None."""
    name, of = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    if getattr(of, "__name__", "") == "time" or (name in _CLOCKS and isinstance(of, type)):
        return "clock" if name != "sleep" else None
    if isinstance(of, random.Random):
        return "python random" if of is not _SEEDED else None
    return _CALLS.get(name)


def _numpy_states() -> dict[int, str]:
    """Return the state of each NumPy generator in this process, by its identity."""
    generators = [each for each in gc.get_objects() if type(each) is np.random.Generator]
    return {id(each): repr(each.bit_generator.state) for each in generators}
