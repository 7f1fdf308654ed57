"""What the operator asks for: faults, aimed at a member or a node, here or elsewhere. A layer of `core`."""

from __future__ import annotations

from typing import Any

from elastrain.agent_messages import ArmFault
from elastrain.launcher.faults import RANDOM, Fault
from elastrain.launcher.notices import Ask
from elastrain.launcher.roll import Roll
from elastrain.launcher.values import Command, Kill, KillNode, Log, Stage, Tell, TellNodes

Answer = tuple[str, bool, list[Command]]
"""A sentence for the operator, whether the request was taken, and what to do."""


class Requests(Roll):
    """Faults on request."""

    def inject(self, fault: Fault) -> Answer:
        """The operator asks for a fault."""
        if not self.config.armed:
            return "this run is not armed: start it with --inject (or --faults FILE)", False, []
        if fault.node:
            return self._inject_node(fault)
        if fault.member == RANDOM:
            candidates = [m for m in (self.view.ids if self.view else ()) if self._can_be_hit(m)]
            if not candidates:
                return "there is no member to choose from yet", False, []
            fault = Fault(kind=fault.kind, member=self._choose(candidates), step=fault.step, phase=fault.phase)
        node = self._node_of(fault.member)
        if node is not None:
            return f"{fault} is on its way", True, [_ask(fault, node)]
        worker = self.workers.get(fault.member)
        if worker is None or not worker.alive:
            alive = ", ".join([w.id for w in self.living] + [m for m in self._alive_in_view() if self._node_of(m)])
            return f"there is no living member {fault.member}: there are {alive or 'none'}", False, []
        sentence = f"{fault} is on its way"
        log = Log(event="fault", fields=fault_fields(fault))
        if fault.at_once:
            return sentence, True, [log, Kill(member=worker.id, reason=f"{worker.id} is killed on request")]
        if worker.stage is Stage.STARTING:
            self._faults.append(fault)
            # The event log shows it when it is handed over.
            return f"{fault} waits for {worker.id} to be ready", True, []
        return sentence, True, [log, Tell(member=worker.id, message=fault_message(fault))]

    def _inject_node(self, fault: Fault) -> Answer:
        sentence = f"{fault} is on its way"
        if fault.node == self.config.node:
            log = Log(event="fault", fields=fault_fields(fault))
            if not fault.at_once:
                return self._arm_node(fault, log)
            return sentence, True, [log, KillNode(reason=f"node {fault.node} is killed on request")]
        if fault.node in self.nodes:
            return sentence, True, [_ask(fault, fault.node)]
        there = ", ".join(sorted([self.config.node, *self.nodes]))
        return f"there is no node {fault.node}: there are {there}", False, []

    def _arm_node(self, fault: Fault, log: Log) -> Answer:
        """Its first worker that is ready takes the node along when it gets there."""
        worker = next((w for w in self.living if w.stage is not Stage.STARTING), None)
        if worker is None:
            self._faults.append(fault)
            return f"{fault} waits for a worker to be ready", True, []
        return f"{fault} is on its way", True, [log, Tell(member=worker.id, message=fault_message(fault))]

    def _node_of(self, member: str) -> str | None:
        """The other node where that living member is."""
        node = self.view.nodes.get(member) if self.view else None
        return node if node != self.config.node and node in self.nodes and self.is_alive(member) else None

    def _can_be_hit(self, member: str) -> bool:
        worker = self.workers.get(member)
        return worker.stage is Stage.MEMBER if worker is not None else self._node_of(member) is not None


def fault_message(fault: Fault) -> ArmFault:
    return ArmFault(kind=fault.kind, step=fault.step, phase=fault.phase, node=bool(fault.node))


def fault_fields(fault: Fault) -> dict[str, Any]:
    target = {"node": fault.node} if fault.node else {"member": fault.member}
    return {"class": fault.kind, **target, "step": fault.step, "phase": fault.phase}


def _ask(fault: Fault, node: str) -> TellNodes:
    return TellNodes(message=Ask(kind=fault.kind, target=fault.target, at=fault.at), node=node)
