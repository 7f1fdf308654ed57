"""Faults that the agent has armed in this worker: they strike when their step and phase are reached."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastrain import protocol as p
from elastrain.job.values import Report
from elastrain.protocol.agent_messages import ArmFault
from elastrain.protocol.messages import Copied, Partial, ShardCopy
from elastrain.runtime.faults.fault_actions import ACTIONS, Tools
from elastrain.runtime.io.journal import Journal

LOOP_PHASES = frozenset({"forward", "backward", "shutdown"})
"""Reached in the training loop's own thread; the engine's thread comes to all others."""


class ArmedFaults:
    """Armed by the engine's thread; `reach` is called by it and by the training loop's.

    `tell` says to the agent, by number, that a fault which it carries out has come to its place.
    """

    def __init__(self, journal: Journal, tell: Callable[[int], None], tools: Tools | None = None) -> None:
        self.tools = tools or Tools()
        self._journal, self._tell = journal, tell
        self._lock = threading.Lock()
        self._armed: list[ArmFault] = []
        self._is_recovering = False  # in the first view nothing is: its phases have no names there

    def arm(self, fault: ArmFault) -> None:
        action = ACTIONS.get(fault.kind)
        if action is not None and action.prepare is not None:
            action.prepare(self.tools)
        self._armed.append(fault)

    def reach(self, step: int, phase: str) -> None:
        """Called at each place that has a name; strikes if that is where a fault was aimed, once."""
        if not self._armed:
            return
        for fault in self._take_due(step, phase):
            self._journal.write("fault", kind=fault.kind, step=step, phase=phase)
            if fault.number is not None:
                self._tell(fault.number)
            self._strike(fault)

    def reach_before(self, command: p.Command) -> None:
        """What the engine is about to carry out may be such a place."""
        match command:
            case p.EditMesh():
                self._is_recovering = command.view.generation > 1
                self._reach_recovery(command.step, "quiesce")
            case p.SendMessage(message=Report() as report):
                self._reach_recovery(report.committed + 1, "report")
            case p.Decided():
                self._reach_recovery(command.step, "decide")
            case p.Resumed():
                self._reach_recovery(command.recovery.committed + 1, "complete")
            case p.Keep(step=step) | p.SendMessage(message=Partial(step=step)):
                self.reach(step, "reduce")
            case p.Apply():
                self.reach(command.record.step, "apply")
            case p.TakeCopy(step=step) | p.SendMessage(message=ShardCopy(step=step) | Copied(step=step)):
                self.reach(step + 1, "copy")

    def _reach_recovery(self, step: int, phase: str) -> None:
        if self._is_recovering:
            self.reach(step, phase)

    def _take_due(self, step: int, phase: str) -> list[ArmFault]:
        with self._lock:
            due = [fault for fault in self._armed if _is_due(fault, step, phase)]
            for fault in due:
                self._armed.remove(fault)
        return due

    def _strike(self, fault: ArmFault) -> None:
        action = ACTIONS.get(fault.kind)
        if action is not None:
            problem = action.strike(fault, self.tools)
        else:  # the agent, which was told, strikes
            problem = "" if fault.number is not None else "this worker does not know the class"
        if problem:  # never in silence: who asked for it believes that it has struck
            self._journal.write("fault_refused", kind=fault.kind, reason=problem)


def _is_due(fault: ArmFault, step: int, phase: str) -> bool:
    if fault.step not in (None, step) or fault.phase not in (None, phase):
        return False
    action = ACTIONS.get(fault.kind)
    return action is None or not action.in_loop or phase in LOOP_PHASES
