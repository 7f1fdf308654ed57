"""Failing on purpose, from inside: armed faults strike when their step and phase are reached.

Works only where the launcher armed injection at the start of the job.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from elastrain.agent_messages import ArmFault
from elastrain.runtime.journal import Journal


class ArmedFaults:
    """The faults that this member's agent has asked for. `kill_node` tells it that one for its whole node is due."""

    def __init__(self, journal: Journal, kill_node: Callable[[], None]) -> None:
        self._journal = journal
        self._kill_node = kill_node
        self._armed: list[ArmFault] = []

    def arm(self, fault: ArmFault) -> None:
        self._armed.append(fault)

    def reach(self, step: int, phase: str) -> None:
        """Called at each place that has a name; strikes if that is where a fault was aimed."""
        for fault in self._armed:
            if fault.step in (None, step) and fault.phase in (None, phase):
                self._journal.write("fault", kind=fault.kind, step=step, phase=phase)
                if fault.node:
                    self._kill_node()
                os.kill(os.getpid(), signal.SIGKILL)
