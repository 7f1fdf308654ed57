"""What the operator asks for: faults, aimed at a member or a node, here or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastrain.agent_messages import ArmFault, Struck
from elastrain.errors import ConfigError
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.stages import Stage
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.faults import RANDOM, Fault, make_fault
from elastrain.launcher.notices import Ask
from elastrain.launcher.values import Command, Kill, KillNode, Log, Tell, TellNodes

FaultAnswer = tuple[str, bool, list[Command]]
"""A sentence for the operator, whether the request was taken, and what to do."""
_NOT_THERE_YET = (Stage.STARTING, Stage.REFUSED)


class FaultRequests:
    """Owns the faults that wait for a worker to be ready. `choose` picks one of several members for `member:random`."""

    def __init__(self, cluster: Cluster, faults: Sequence[Fault], choose: Callable[[Sequence[str]], str]) -> None:
        self._cluster, self._config, self._choose = cluster, cluster.config, choose
        self._waiting = list(faults)

    def inject(self, fault: Fault) -> FaultAnswer:
        """The operator asks for a fault."""
        if not self._config.armed:
            return "this run is not armed: start it with --inject (or --faults FILE)", False, []
        if fault.node:
            return self._inject_node(fault)
        if fault.member == RANDOM:
            candidates = [m for m in self._cluster.ids if self._can_be_hit(m)]
            if not candidates:
                return "there is no member to choose from yet", False, []
            fault = Fault(kind=fault.kind, member=self._choose(candidates), step=fault.step, phase=fault.phase)
        node = self._node_of(fault.member)
        if node is not None:
            return f"{fault} is on its way", True, [_ask(fault, node)]
        worker = self._cluster.workers.by_id.get(fault.member)
        if worker is None or not worker.alive:
            return f"there is no living member {fault.member}: there are {self._living() or 'none'}", False, []
        return self._inject_worker(fault, worker)

    def _inject_worker(self, fault: Fault, worker: Worker) -> FaultAnswer:
        sentence, log = f"{fault} is on its way", _log(fault)
        if fault.at_once:
            return sentence, True, [log, Kill(member=worker.id, reason=f"{worker.id} is killed on request")]
        if worker.stage in _NOT_THERE_YET:
            self._waiting.append(fault)
            # The event log shows it when it is handed over.
            return f"{fault} waits for {worker.id} to be ready", True, []
        return sentence, True, [log, _tell(fault, worker)]

    def _inject_node(self, fault: Fault) -> FaultAnswer:
        sentence, nodes = f"{fault} is on its way", self._cluster.peers.nodes
        if fault.node == self._config.node:
            if not fault.at_once:
                return self._arm_node(fault)
            return sentence, True, [_log(fault), KillNode(reason=f"node {fault.node} is killed on request")]
        if fault.node in nodes:
            return sentence, True, [_ask(fault, fault.node)]
        there = ", ".join(sorted([self._config.node, *nodes]))
        return f"there is no node {fault.node}: there are {there}", False, []

    def _arm_node(self, fault: Fault) -> FaultAnswer:
        """Its first worker that is ready takes the node along when it gets there."""
        worker = next((w for w in self._cluster.workers.living if w.stage not in _NOT_THERE_YET), None)
        if worker is None:
            self._waiting.append(fault)
            return f"{fault} waits for a worker to be ready", True, []
        return f"{fault} is on its way", True, [_log(fault), _tell(fault, worker)]

    def hand_over(self, worker: Worker) -> list[Command]:
        """It is ready: the faults that wait for it, or for any worker of this node."""
        # Fault files name members that do not exist yet: a replacement takes what was meant for its number.
        mine = [f for f in self._waiting if f.member == worker.id or f.node == self._config.node]
        self._waiting = [f for f in self._waiting if f not in mine]
        return [command for fault in mine for command in (_log(fault), _tell(fault, worker))]

    def choose_victims(self) -> list[Command]:
        """In the first view: `random` means one member of all, so the agent of the first one chooses for everybody."""
        waiting, self._waiting = self._waiting, []
        commands: list[Command] = []
        for fault in waiting:
            if fault.member != RANDOM:
                self._waiting.append(fault)
            elif self._cluster.members[0].node == self._config.node:
                commands += self.inject(fault)[2]
        return commands

    def on_ask(self, node: str, notice: Ask, now: float) -> list[Command]:
        """The operator has asked another agent."""
        try:
            fault = make_fault(notice.kind, notice.target, notice.at or None)
        except ConfigError as error:
            return [Log(event="fault_refused", fields={"reason": str(error)})]
        sentence, taken, commands = self.inject(fault)
        return commands if taken else [Log(event="fault_refused", fields={"reason": sentence})]

    def on_struck(self, worker: Worker, message: Struck, now: float) -> list[Command]:
        """It is where the whole node was to be killed. Only in an armed run: a script could say so, too."""
        reason = f"node {self._config.node} is killed on request"
        return [KillNode(reason=reason)] if self._config.armed else []

    def _living(self) -> str:
        elsewhere = [m for m in self._cluster.alive_in_view() if self._node_of(m)]
        return ", ".join([worker.id for worker in self._cluster.workers.living] + elsewhere)

    def _node_of(self, member: str) -> str | None:
        """The other node where that living member is."""
        cluster = self._cluster
        node = cluster.view.nodes.get(member) if cluster.view else None
        there = node != self._config.node and node in cluster.peers.nodes
        return node if there and cluster.is_alive(member) else None

    def _can_be_hit(self, member: str) -> bool:
        worker = self._cluster.workers.by_id.get(member)
        if worker is None:
            return self._node_of(member) is not None
        return worker.stage in (Stage.MEMBER, Stage.NEWCOMER)


def _tell(fault: Fault, worker: Worker) -> Tell:
    message = ArmFault(kind=fault.kind, step=fault.step, phase=fault.phase, node=bool(fault.node))
    return Tell(member=worker.id, message=message)


def _log(fault: Fault) -> Log:
    target = {"node": fault.node} if fault.node else {"member": fault.member}
    return Log(event="fault", fields={"class": fault.kind, **target, "step": fault.step, "phase": fault.phase})


def _ask(fault: Fault, node: str) -> TellNodes:
    return TellNodes(message=Ask(kind=fault.kind, target=fault.target, at=fault.at), node=node)
