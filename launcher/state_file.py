"""The run's state for `status`, written when the view changes and now and then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastrain.launcher.events import EventLog
from elastrain.launcher.rundir import RunDir

_STATE_EVERY_S = 5.0
"""So that `status` knows about where a run was whose agent was killed."""


class StateFile:
    """`describe` makes the state as of a monotonic time."""

    def __init__(self, run: RunDir, log: EventLog, describe: Callable[[float], dict[str, Any]]) -> None:
        self._run, self._log, self._describe = run, log, describe
        self._written_s = 0.0
        self.stale = False
        """Something has changed that `status` should show soon."""

    def on_tick(self, now: float) -> None:
        if self.stale or now - self._written_s > _STATE_EVERY_S:
            self.write(now)

    def write(self, now: float) -> None:
        self.stale, self._written_s = False, now
        try:
            self._run.write_state(self._describe(now))
        except OSError as error:  # a full disk must not end a job
            self._log.write("state_not_written", reason=str(error))
