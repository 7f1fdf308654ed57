"""Whom a fault means: which of several for `random`, and on which node each one is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.stages import Stage
from elastrain.launcher.faults.fault import Fault, Scheme, Target


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """A target that means nobody; the sentence says why."""

    sentence: str


class FaultTargets:
    """Questions about the cluster. `choose` picks one of several for `random`."""

    def __init__(self, cluster: Cluster, choose: Callable[[Sequence[str]], str]) -> None:
        self._cluster, self._choose = cluster, choose

    def named(self, fault: Fault) -> Fault | Unknown:
        """The fault with a name for each `random`, all of them different; everybody else must be there."""
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
        """The node on which the target is struck: this one for what is here, or is not known elsewhere."""
        if target.scheme is Scheme.NODE:
            return target.name
        return self._elsewhere(target.name) or self._cluster.config.node

    def is_first(self) -> bool:
        """Whether this node acts for all: one agent carries out each line that stands in everybody's faults file."""
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
        """The other node where that living member is."""
        cluster = self._cluster
        node = cluster.view.nodes.get(member) if cluster.view else None
        there = node != cluster.config.node and node in cluster.peers.nodes
        return node if there and cluster.is_alive(member) else None

    def _can_be_hit(self, member: str) -> bool:
        worker = self._cluster.workers.by_id.get(member)
        if worker is None:
            return self._elsewhere(member) is not None
        return worker.stage in (Stage.MEMBER, Stage.NEWCOMER)
