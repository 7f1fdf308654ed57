"""How often simulated nodes that were lost are started again."""

from __future__ import annotations

import time

from elastrain.launcher.say import say

RESTART_COUNTS_S = 3600.0
"""How long a node's restart counts."""


class NodeRestarts:
    """Which nodes were started again, and whether one more may be."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._at_s: list[float] = []
        self.names: set[str] = set()

    def take(self, name: str) -> bool:
        """Says so, either way."""
        now_s = time.monotonic()
        self._at_s = [at_s for at_s in self._at_s if at_s + RESTART_COUNTS_S > now_s]
        if len(self._at_s) >= self._allowed:
            say(f"{name} was lost; it is not started again: --max-restarts {self._allowed}")
            return False
        self._at_s.append(now_s)
        self.names.add(name)
        say(f"{name} was lost; it is started again ({len(self._at_s)} of {self._allowed})")
        return True
