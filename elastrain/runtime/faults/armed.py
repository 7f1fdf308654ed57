"""Faults that the agent has armed in this worker: they strike when their step and phase are reached."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastrain import protocol as p
from elastrain.job.values import Record, Report, Vote
from elastrain.pipeline.pipeline_plan import PipelinePlan
from elastrain.pipeline.planner.plan_vote import PlanVote
from elastrain.protocol.agent_messages import ArmFault
from elastrain.protocol.messages import Copied, Partial, ShardCopy
from elastrain.protocol.move_messages import ShadowPiece
from elastrain.runtime.faults.fault_actions import ACTIONS, Tools
from elastrain.runtime.io.journal import Journal

LOOP_PHASES = frozenset({"forward", "backward", "shutdown"})
"""Phases that the training loop's thread reaches. The engine's thread reaches all others."""


class ArmedFaults:
    """The faults that wait in this worker.

    The engine's thread arms them; it and the training loop's thread call `reach`.

    `tell` informs the agent, by number, that a fault which the agent carries out has reached its place.
    """

    def __init__(self, journal: Journal, tell: Callable[[int], None], tools: Tools | None = None) -> None:
        self.tools = tools or Tools()
        self._journal, self._tell = journal, tell
        self._lock = threading.Lock()
        self._armed: list[ArmFault] = []
        self._is_recovering = False  # the first view is no recovery, so its phases have no names

    def arm(self, fault: ArmFault) -> None:
        """Prepare the fault's tools and let it wait for its place."""
        action = ACTIONS.get(fault.kind)
        if action is not None and action.prepare is not None:
            action.prepare(self.tools)
        self._armed.append(fault)

    def reach(self, step: int, phase: str) -> None:
        """Carry out the faults that are aimed at this step and phase, once. Called at each named place."""
        if not self._armed:
            return
        for fault in self._take_due(step, phase):
            self._journal.write("fault", kind=fault.kind, step=step, phase=phase)
            if fault.number is not None:
                self._tell(fault.number)
            self._strike(fault)

    def reach_before(self, command: p.Command) -> None:
        """Check whether the command that the engine is about to carry out is a named place."""
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
            case p.Passed(record=Record(step=step, plan=PipelinePlan(coming=(_, *_)))):
                self.reach(step, "move-record")
            case p.TakeParameters(step=step, part=(_, _)) | p.SendMessage(message=ShadowPiece(step=step)):
                self.reach(step + 1, "move-publish")
            case p.SendMessage(message=Vote(step=step, plan=PlanVote(is_ready=True))):
                self.reach(step, "move-ready")
            case p.Moved(is_dropped=False):
                self.reach(command.step, "move-over")
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
        else:  # the agent was told, and strikes
            problem = "" if fault.number is not None else "this worker does not know the class"
        if problem:  # always reported: the user who asked for the fault believes that it has struck
            self._journal.write("fault_refused", kind=fault.kind, reason=problem)


def _is_due(fault: ArmFault, step: int, phase: str) -> bool:
    if fault.step not in (None, step) or fault.phase not in (None, phase):
        return False
    action = ACTIONS.get(fault.kind)
    return action is None or not action.in_loop or phase in LOOP_PHASES
