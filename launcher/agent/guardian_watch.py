"""Watches that start another guardian when its process is killed."""

from __future__ import annotations

import os
from collections.abc import Callable

from elastrain.base.event_loop import EventLoop
from elastrain.launcher.agent.guardian import Guardian


class GuardianWatch:
    """A watch on the guardian's process in its owner's loop. `tell` takes a sentence for people."""

    def __init__(self, loop: EventLoop, guardian: Guardian, tell: Callable[[str], None]) -> None:
        self._loop, self._guardian, self._tell = loop, guardian, tell
        self._begin()

    def close(self) -> None:
        """Stop the watch. Call this before the guardian itself is closed."""
        self._loop.unregister(self._pidfd)
        os.close(self._pidfd)

    def _begin(self) -> None:
        self._pidfd = os.pidfd_open(self._guardian.pid)
        self._loop.register(self._pidfd, lambda _events: self._on_end())

    def _on_end(self) -> None:
        self.close()
        self._guardian.begin_again()
        self._begin()
        self._tell("the process that clears up should this one be killed was killed itself: another one does it now")
