"""The core's commands in their order, whatever follows from carrying one out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from elastrain.launcher.values import Command


class CommandQueue:
    """`carry_out` may add commands; it is never entered twice at once."""

    def __init__(self, carry_out: Callable[[Command], None]) -> None:
        self._carry_out = carry_out
        self._waiting: deque[Command] = deque()
        self._busy = False

    def add(self, commands: Sequence[Command]) -> None:
        """Behind those that wait."""
        self._waiting.extend(commands)
        self._work()

    def add_first(self, commands: Sequence[Command]) -> None:
        """What follows from a command's answer comes before the commands behind it."""
        self._waiting.extendleft(reversed(commands))
        self._work()

    def _work(self) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            while self._waiting:
                self._carry_out(self._waiting.popleft())
        finally:
            self._busy = False
