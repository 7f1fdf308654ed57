"""Turns of the members of one node: the first of them writes down in the run's folder that the others may follow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from elastrain.base.environment import Environment
from elastrain.job.world import View
from elastrain.runtime.io.heartbeat import LoopHeartbeat

MAIN_FIRST_TIMEOUT_S = 1800.0
"""Timeout of `job.main_first`, for the wait and for the code inside."""
_LOOK_S = 0.05


class Turns:
    """The turns of one member. Members count them alike, from the start of the script and again in each step."""

    def __init__(self, environment: Environment, slot: int | None, whereabouts: LoopHeartbeat) -> None:
        self._me, self._slot, self._whereabouts = environment, slot, whereabouts
        self._step, self._count = -1, 0

    def begin(self, step: int) -> None:
        """Count anew from the start of a step, because members that join in it have taken no turns before."""
        self._step, self._count = step, 0

    @contextmanager
    def take(self, view: Callable[[], View | None], timeout_s: float) -> Iterator[None]:
        """Run the body at once if this member goes first, else when the first one has left it, by an exception too.

        Args:
            view: Returns the current view if this member belongs to it. Another member goes first once one is lost.
            timeout_s: Seconds to wait at most.

        Raises:
            ConfigError: `timeout_s` is not above 0.
            TimeoutError: The first member has not left the body within `timeout_s`.
        """
        folder = self._me.run_dir
        self._count += 1
        turn = f"{self._step}.{self._count}"
        with self._whereabouts.stretch("job.main_first", timeout_s):
            if folder is None:
                yield
                return
            taken = folder / f"first-{self._me.node}-{self._me.life}"
            is_first = self._wait(lambda: self._is_first(view()), lambda: _has(taken, turn), timeout_s)
            try:
                yield
            finally:
                if is_first:
                    _add(taken, turn)

    def _wait(self, is_first: Callable[[], bool], has_been: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until this member may go. Returns True if it goes first. Raises TimeoutError."""
        deadline_s = time.monotonic() + timeout_s
        while not is_first():
            if has_been():
                return False
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"{self._me.member} has waited {timeout_s:g} s in job.main_first() for the first member of "
                    f"{self._me.node}, which is still in it or never came: call it on all members alike, and give it "
                    "a longer timeout= if the work takes longer"
                )
            time.sleep(_LOOK_S)
        return True

    def _is_first(self, view: View | None) -> bool:
        if view is None:
            return not self._slot
        return next(each.id for each in view.members if each.node == self._me.node) == self._me.member


def _has(taken: Path, turn: str) -> bool:
    return taken.exists() and turn in taken.read_text().splitlines()


def _add(taken: Path, turn: str) -> None:
    with os.fdopen(os.open(taken, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(f"{turn}\n")
