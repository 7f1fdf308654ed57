"""Failing on purpose, from inside: armed faults strike when their step and phase are reached.

Works only where the launcher armed injection at the start of the job.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from elastrain.runtime.journal import Journal


@dataclass(frozen=True, kw_only=True)
class ArmedFault:
    kind: str
    step: int | None
    phase: str | None
    node: bool = False
    """The whole node is to die with this worker."""


class Faults:
    def __init__(self, journal: Journal, kill_node: Callable[[], None]) -> None:
        self._journal = journal
        self._kill_node = kill_node
        self._armed: list[ArmedFault] = []

    def arm(self, fault: ArmedFault) -> None:
        self._armed.append(fault)

    def reach(self, step: int, phase: str) -> None:
        """Called at each place that has a name; strikes if that is where a fault was aimed."""
        for fault in self._armed:
            if fault.step in (None, step) and fault.phase in (None, phase):
                self._journal.write("fault", kind=fault.kind, step=step, phase=phase)
                if fault.node:
                    self._kill_node()
                os.kill(os.getpid(), signal.SIGKILL)
