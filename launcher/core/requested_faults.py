"""Faults that the operator asks for: their targets, whether they would destroy state, and when they strike.

A fault is aimed at members or nodes, on this or another node, and strikes at once, at a time, or at a place of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from elastrain.errors import ConfigError
from elastrain.job.world import View
from elastrain.launcher.core.agent_events import AgentPart
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.deadlines import Deadlines, FaultDue
from elastrain.launcher.core.worker_table import Stage, Worker
from elastrain.launcher.faults import grammar
from elastrain.launcher.faults.fault import Fault, Scheme, Target
from elastrain.launcher.faults.table import CLASSES, NOT_ARMED, Carrier, lasts_s, settings
from elastrain.launcher.faults.victims import victims
from elastrain.launcher.shared.job_values import AskLauncher, Command, Kill, KillNode, Log, Strike, Tell, TellNodes
from elastrain.launcher.shared.notices import Ask
from elastrain.protocol.agent_messages import ArmFault, Struck
from elastrain.protocol.handlers import handles


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """A target that does not exist. The sentence says why."""

    sentence: str


class FaultTargets:
    """The targets of faults, looked up in the cluster. `choose` picks one of several candidates for `random`."""

    def __init__(self, cluster: Cluster, choose: Callable[[Sequence[str]], str]) -> None:
        self._cluster, self._choose = cluster, choose

    def named(self, fault: Fault) -> Fault | Unknown:
        """Return the fault with a different name for each `random`, or `Unknown` if a target does not exist."""
        targets: list[Target] = [target for target in fault.targets if not target.is_random]
        for target in targets:
            problem = self._problem(target)
            if problem:
                return Unknown(sentence=problem)
        for target in fault.targets:
            if target.is_random:
                taken = {other.name for other in targets}
                candidates = [name for name in self._candidates(target.scheme) if name not in taken]
                if not candidates:
                    return Unknown(sentence=f"there is no {target.scheme} to choose from yet")
                targets.append(Target(scheme=target.scheme, name=self._choose(candidates)))
        return fault.aimed_at(targets)

    def node_of(self, target: Target) -> str:
        """Return the node that has to strike this target. Targets that are not known elsewhere belong to this node."""
        if target.scheme is Scheme.NODE:
            return target.name
        return self._elsewhere(target.name) or self._cluster.config.node

    def is_first(self) -> bool:
        """Return True if this node acts for all, so that each line of the common faults file strikes only once."""
        cluster, me = self._cluster, self._cluster.config.node
        if cluster.view is not None:
            return cluster.first_answering_node() == me
        return cluster.config.alone or (cluster.roster is not None and cluster.roster.nodes[0].name == me)

    def _problem(self, target: Target) -> str:
        cluster = self._cluster
        if target.scheme is not Scheme.MEMBER:
            there = {cluster.config.node, *cluster.peers.nodes}
            missing = [node for node in target.nodes if node not in there]
            return f"there is no node {missing[0]}: there are {', '.join(sorted(there))}" if missing else ""
        if self._elsewhere(target.name):
            return ""
        worker = cluster.workers.by_id.get(target.name)
        is_gone = worker is None or not worker.alive
        return f"there is no living member {target.name}: there are {self._living() or 'none'}" if is_gone else ""

    def _candidates(self, scheme: Scheme) -> list[str]:
        cluster = self._cluster
        if scheme is Scheme.NODE:
            return sorted({member.node for member in cluster.members if cluster.is_alive(member.id)})
        return [member for member in cluster.ids if self._can_be_hit(member)]

    def _living(self) -> str:
        elsewhere = [m for m in self._cluster.alive_in_view() if self._elsewhere(m)]
        return ", ".join([worker.id for worker in self._cluster.workers.living] + elsewhere)

    def _elsewhere(self, member: str) -> str | None:
        """Return the other node on which this member lives, or None."""
        cluster = self._cluster
        node = cluster.view.nodes.get(member) if cluster.view else None
        there = node != cluster.config.node and node in cluster.peers.nodes
        return node if there and cluster.is_alive(member) else None

    def _can_be_hit(self, member: str) -> bool:
        worker = self._cluster.workers.by_id.get(member)
        if worker is None:
            return self._elsewhere(member) is not None
        return worker.stage in (Stage.MEMBER, Stage.NEWCOMER)


def would_cost_state(fault: Fault, cluster: Cluster, doubtful: Collection[str]) -> str:
    """Return the reason why the fault may destroy state, or "" if it may strike. All its targets must have names.

    `doubtful`: members that earlier faults may already have destroyed.
    """
    struck = victims(fault, {member.id: member.node for member in cluster.members})
    if not struck:
        return ""
    holders = cluster.holders
    if holders is None:
        return f"{fault} does not strike: who holds the state is not known yet"
    left = set(cluster.alive_in_view()) - struck - set(doubtful)
    bare = [shard for shard, held in holders.items() if not left & set(held)]
    if bare or not left:
        what = f"all holders of shard {bare[0]}" if bare else "all members"
        return f"{fault} does not strike: {what} would be struck"
    # The side that is cut off must be the smaller one. Otherwise the job could not change its view.
    if CLASSES[fault.kind].by is Carrier.LAUNCHER and 2 * len(left) <= len(cluster.ids):
        return f"{fault} does not strike: no majority would be left"
    return ""


FaultAnswer = tuple[str, bool, list[Command]]
"""A sentence for the operator, whether the request was accepted, and the commands to carry out."""
_NOT_THERE_YET = (Stage.STARTING, Stage.REFUSED)


class FaultRequests(AgentPart):
    """Faults that wait: for a worker to be ready, for a time, or for a worker to reach their place."""

    def __init__(
        self, cluster: Cluster, deadlines: Deadlines, faults: Sequence[Fault], choose: Callable[[Sequence[str]], str]
    ) -> None:
        self._cluster, self._config, self._deadlines = cluster, cluster.config, deadlines
        self._targets = FaultTargets(cluster, choose)
        self._waiting: list[Fault] = []
        """Waiting faults with one target each, except for those that wait for the first view."""
        self._timed: dict[int, tuple[Fault, bool]] = {}
        """Number -> timed fault, and True if the operator asked this agent for it, so that no other agent strikes."""
        self._armed: dict[int, Fault] = {}
        """Number -> fault for which a worker reports when it has reached the place."""
        self._wrong: dict[str, str] = {}
        """Member -> the defect that its replacement is to have."""
        self._last_number = 0
        for fault in faults:
            if fault.place.t_s is not None:
                self._set_timer(fault, asked=False)
            elif _is_for_first_view(fault):
                self._waiting.append(fault)
            else:
                self._waiting += fault.singles()

    def inject(self, fault: Fault, careful_of: Collection[str] | None = None) -> FaultAnswer:
        """Inject a fault that the operator asks for. Returns a sentence, whether it is accepted, and commands.

        If `careful_of` is given, the fault is refused if it could destroy state after the loss of these members.
        """
        if not self._config.armed:
            return NOT_ARMED, False, []
        if fault.place.t_s is not None:
            self._set_timer(fault, asked=True)
            return f"{fault} is due", True, []
        step, committed = fault.place.step, self._cluster.progress.step
        if step is not None and committed is not None and step <= committed:
            return f"step {step} has passed: step {committed} is committed", False, []
        named = self._targets.named(fault)
        if isinstance(named, Unknown):
            return named.sentence, False, []
        if careful_of is not None:
            problem = would_cost_state(named, self._cluster, careful_of)
            if problem:
                return problem, False, []
        if CLASSES[fault.kind].by is Carrier.LAUNCHER:
            return self._inject_around(named)
        answers = [self._inject_one(single) for single in named.singles()]
        return "; ".join(sentence for sentence, _ in answers), True, [c for _, commands in answers for c in commands]

    @handles(Ask)
    def on_ask(self, notice: Ask) -> list[Command]:
        """Inject a fault that another agent, which the operator has asked, sends to this node."""
        try:
            fault = grammar.parse(notice.line)
        except ConfigError as error:
            return [_refused(str(error))]
        return self._inject_or_log(fault)

    @handles(FaultDue)
    def on_due(self, due: FaultDue) -> list[Command]:
        """Inject a fault whose time has come. Of a common faults file, only one agent does."""
        fault, asked = self._timed.pop(due.number)
        if not asked and not self._targets.is_first():
            return []
        return self._inject_or_log(fault.when_due())

    def hand_over(self, worker: Worker) -> list[Command]:
        """Give a ready worker the faults that wait for it, or for any worker of this node."""
        # Fault files may name members that do not exist yet: a replacement gets the faults for its number.
        here = [f for f in self._waiting if f.member == worker.id or f.node == self._config.node]
        mine = [f for f in here if not _is_for_first_view(f)]
        self._waiting = [f for f in self._waiting if f not in mine]
        return [command for fault in mine for command in (_log(fault), self._arm(fault, worker))]

    def on_view(self, view: View, before: View | None, now: float) -> list[Command]:
        """Inject the faults that wait for the first view. One agent chooses the `random` victims for all nodes."""
        if before is not None:
            return []
        mine = [fault for fault in self._waiting if _is_for_first_view(fault)]
        self._waiting = [fault for fault in self._waiting if fault not in mine]
        if self._cluster.late or not self._targets.is_first():  # a node that came late has missed the first view
            return []
        return [command for fault in mine for command in self._inject_or_log(fault)]

    @handles(Struck)
    def on_struck(self, worker: Worker, message: Struck) -> list[Command]:
        """Strike, because a worker has reached the place of a fault.

        Reports count only in armed runs: a script could forge them.
        """
        fault = self._armed.pop(message.number, None)
        if fault is None or not self._config.armed:
            return []
        if CLASSES[fault.kind].by is Carrier.LAUNCHER:
            return [AskLauncher(line=str(fault.struck_at_once()))]
        return self._strike(fault, at=worker.id)

    def take_wrong(self, member: str) -> str:
        """Return and forget the defect that the replacement of this member is to have, or ""."""
        return self._wrong.pop(member, "")

    def _inject_or_log(self, fault: Fault) -> list[Command]:
        sentence, taken, commands = self.inject(fault)
        return commands if taken else [_refused(sentence)]

    def _inject_one(self, fault: Fault) -> tuple[str, list[Command]]:
        """Inject a fault with one target. Returns a sentence and commands."""
        node = self._targets.node_of(fault.target)
        if node != self._config.node:
            return f"{fault} is on its way", [TellNodes(message=Ask(line=str(fault)), node=node)]
        worker = self._cluster.workers.by_id[fault.member] if fault.member else None
        if fault.place.at_once and not _needs_worker(fault):
            return f"{fault} is on its way", [_log(fault), *self._strike(fault)]
        worker = worker or self._first_ready()
        if worker is None or worker.stage in _NOT_THERE_YET:
            self._waiting.append(fault)
            # the event log shows the fault when the worker gets it
            return f"{fault} waits for {fault.member or 'a worker'} to be ready", []
        return f"{fault} is on its way", [_log(fault), self._arm(fault, worker)]

    def _inject_around(self, fault: Fault) -> FaultAnswer:
        """Inject a fault of the network or of etcd at its place. The launcher carries it out."""
        worker = self._first_ready()
        if fault.place.at_once:
            return f"{fault} is on its way", True, [_log(fault), AskLauncher(line=str(fault))]
        if worker is None:
            return "there is no member yet that could come to that place", False, []
        return f"{fault} is on its way", True, [_log(fault), self._arm(fault, worker)]

    def _strike(self, fault: Fault, at: str = "") -> list[Command]:
        """Carry out the fault on this node now. `at`: the member that has reached its place."""
        member, whom = fault.member, str(fault.target).replace(":", " ")
        if fault.kind == "kill" and fault.node:
            return [KillNode(reason=f"{whom} is killed on request")]
        if fault.kind in ("kill", "wrong-replacement"):
            if fault.kind == "wrong-replacement":
                self._wrong[member] = str(settings(fault)["what"])
            return [Kill(member=member, reason=f"{member} is killed on request")]
        return [Strike(kind=fault.kind, member=member, for_s=lasts_s(fault), options=settings(fault), at=at)]

    def _arm(self, fault: Fault, worker: Worker) -> Tell:
        self._last_number += 1
        told = fault.target.scheme is not Scheme.MEMBER or CLASSES[fault.kind].by is not Carrier.WORKER
        if told:
            self._armed[self._last_number] = fault
        message = ArmFault(
            kind=fault.kind,
            step=fault.place.step,
            phase=fault.place.phase,
            for_s=lasts_s(fault),
            options=settings(fault),
            number=self._last_number if told else None,
        )
        return Tell(member=worker.id, message=message)

    def _set_timer(self, fault: Fault, *, asked: bool) -> None:
        assert fault.place.t_s is not None
        self._last_number += 1
        self._timed[self._last_number] = fault, asked
        self._deadlines.set(FaultDue(self._last_number), self._config.began_s + fault.place.t_s)

    def _first_ready(self) -> Worker | None:
        """Return this node's first ready worker. It also reports when it reaches the place of a fault of others."""
        return next((w for w in self._cluster.workers.living if w.stage not in _NOT_THERE_YET), None)


def _is_for_first_view(fault: Fault) -> bool:
    """Return True if the fault must wait for the first view, because its target or its reporter is not known yet."""
    return CLASSES[fault.kind].by is Carrier.LAUNCHER or any(target.is_random for target in fault.targets)


def _needs_worker(fault: Fault) -> bool:
    """Return True if only the worker itself can carry out the fault, at the next place that it reaches."""
    return (CLASSES[fault.kind].by is Carrier.WORKER and fault.kind != "kill") or fault.kind == "out-of-memory"


def _log(fault: Fault) -> Log:
    target = {str(fault.target.scheme): fault.target.name}
    place = {"step": fault.place.step, "phase": fault.place.phase}
    return Log(event="fault", fields={"class": fault.kind, **target, **place, "line": str(fault)})


def _refused(sentence: str) -> Log:
    return Log(event="fault_refused", fields={"reason": sentence})
