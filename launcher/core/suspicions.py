"""Suspicions without proof: silent nodes that others may still reach, and members that do not reach one another.

Agents ask and answer about silent nodes in their own keys (`NodeRecord.asks`, `reaches`, `misses`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from elastrain.decisions.membership import with_new_links, without_a_suspect
from elastrain.launcher.core.agent_events import AgentPart
from elastrain.launcher.core.cluster import Cluster, Peers
from elastrain.launcher.core.deadlines import Deadlines, SuspicionDue
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.view_changes import ViewChanges
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.shared.job_values import Command, Log, NodeRecord, TellNodes
from elastrain.launcher.shared.notices import Suspected
from elastrain.protocol.agent_messages import Suspect
from elastrain.protocol.handlers import handles


class ProbeResult(Enum):
    """The answers of the nodes with leases about a silent node without a lease."""

    REACHED = auto()
    """One of them reaches the node: it lives, and has only lost the store."""
    MISSED = auto()
    """None of them reaches the node."""
    OPEN = auto()
    """Some of them have not answered yet."""


@dataclass(frozen=True, kw_only=True)
class DoubtedNode:
    """A doubted node: its `signature` (name and incarnation), and the reason `why` it would otherwise count as dead."""

    signature: str
    why: str


class IndirectProbes:
    """The doubted nodes, which count as dead unless another node reaches them."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._open: dict[str, DoubtedNode] = {}

    @property
    def nodes(self) -> set[str]:
        """The names of the doubted nodes."""
        return set(self._open)

    def add(self, node: str, signature: str, why: str) -> ProbeResult:
        """Doubt a silent node; the first reason is kept. Returns what the other nodes have answered so far."""
        self._open.setdefault(node, DoubtedNode(signature=signature, why=why))
        return self.word_on(node)

    def word_on(self, node: str) -> ProbeResult:
        """Return what the other nodes have answered about a doubted node."""
        signature = self._open[node].signature
        others = [peer.record for name, peer in self._peers.nodes.items() if peer.leased and name != node]
        if any(signature in record.reaches for record in others):
            return ProbeResult.REACHED
        return (
            ProbeResult.MISSED
            if all(signature in (*record.misses, *record.asks) for record in others)
            else ProbeResult.OPEN
        )

    def take(self, node: str) -> str:
        """Stop doubting a node. Returns the reason for the doubt."""
        return self._open.pop(node).why

    def take_missed(self) -> dict[str, str]:
        """Remove the nodes that no node reaches from the doubted ones, and return them with the reasons.

        Doubts about nodes that answer again are dropped.
        """
        nodes = self._peers.nodes
        for node in [node for node in self._open if node in nodes and not nodes[node].is_silent]:
            self.take(node)
        return {node: self.take(node) for node in list(self._open) if self.word_on(node) is ProbeResult.MISSED}

    def record(self) -> NodeRecord:
        """Return this node's record with its questions to the other nodes, and its answers to theirs."""
        asks = {doubt.signature for doubt in self._open.values()}
        peers = self._peers.nodes.values()
        asked = {name for peer in peers for name in peer.record.asks} - asks - {self._peers.record.signature}
        linked = {peer.record.signature for peer in peers if peer.linked}
        return replace(
            self._peers.record,
            asks=tuple(sorted(asks)),
            reaches=tuple(sorted(asked & linked)),
            misses=tuple(sorted(asked - linked)),
        )


class Suspicions(AgentPart):
    """Suspicions between members: who suspects whom, until one agent judges."""

    def __init__(
        self, cluster: Cluster, deadlines: Deadlines, *, shutdown: Shutdown, view_changes: ViewChanges
    ) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._deadlines, self._shutdown, self._view_changes = deadlines, shutdown, view_changes
        self._by_member: dict[str, dict[str, Suspected]] = {}

    def on_suspect(self, by: Worker, message: Suspect, now: float) -> list[Command]:
        """Handle the report of this node's worker that it does not reach another member, and tell the other agents."""
        notice = Suspected(
            member=message.member,
            by=by.id,
            reason=message.reason,
            generation=message.generation,
            link_lost=message.link_lost,
        )
        commands = self._note(notice, now)
        if commands and not self._config.alone:
            commands.append(TellNodes(message=notice))
        return commands

    @handles(Suspected)
    def on_suspected(self, notice: Suspected, now: float) -> list[Command]:
        """Handle such a report of a worker of another node."""
        return self._note(notice, now)

    def forget(self, member: str) -> None:
        """Drop all reports by and about a dead member."""
        self._keep({m for m in self._cluster.ids if m != member})

    def _keep(self, members: Collection[str]) -> None:
        """Keep only reports between these members, and none about links that were made anew since."""
        rest = {
            member: {b: word for b, word in by.items() if b in members and not self._is_of_old_links(word)}
            for member, by in self._by_member.items()
            if member in members
        }
        self._by_member = {member: by for member, by in rest.items() if by}

    def _is_of_old_links(self, word: Suspected) -> bool:
        """Return True if a report is about links older than the view's.

        Both ends close such links, each at its own time.
        """
        return self._cluster.view is not None and word.generation < self._cluster.view.links_since

    def _note(self, notice: Suspected, now: float) -> list[Command]:
        member, by = notice.member, notice.by
        cluster, worker = self._cluster, self._cluster.workers.by_id.get(member)
        if member not in cluster.ids or self._shutdown.finishing or not cluster.is_alive(member):
            return []
        if self._is_of_old_links(notice):
            return []
        if worker is not None and worker.finished:  # it closes its links because it leaves
            return []
        before = self._by_member.get(member, {}).get(by)
        known = before is not None and not self._is_of_old_links(before)
        self._by_member.setdefault(member, {})[by] = notice
        # A death is proven within milliseconds. A member that is alive after this time has lost its links, not its
        # life.
        self._deadlines.set_first(SuspicionDue(), now + self._config.times.suspicion_s)
        return [] if known else [Log(event="suspect", fields={"member": member, "by": by, "reason": notice.reason})]

    @handles(SuspicionDue)
    def on_due(self, now: float) -> list[Command]:
        """Judge the suspicions.

        Only one agent does, and each generation has one view, so two members are never removed at once.
        """
        cluster = self._cluster
        if cluster.view is None or self._shutdown.finishing:
            self._by_member = {}
            return []
        self._keep([m for m in cluster.ids if cluster.is_alive(m)])
        if self._by_member:
            self._deadlines.set(SuspicionDue(), now + self._config.times.suspicion_s)
        # The next view may already be without a suspect. And if nodes do not answer, silence is judged elsewhere:
        # reports by and about their members are out of date, or hold again once they answer.
        if self._view_changes.proposing or cluster.unlinked_nodes():
            return self._tell_again()
        words, self._by_member = self._by_member, self._of_lost_links()
        return self._judge(words) if cluster.first_answering_node() == self._config.node else self._tell_again()

    def _of_lost_links(self) -> dict[str, dict[str, Suspected]]:
        """Return the reports of lost links.

        They hold until links are made anew or one end dies; others are repeated.
        """
        return {
            member: lost
            for member, by in self._by_member.items()
            if (lost := {b: word for b, word in by.items() if word.link_lost})
        }

    def _tell_again(self) -> list[Command]:
        """Send this node's reports of lost links again, because the judging agent may not have got them."""
        mine = self._cluster.workers.by_id
        words = [word for by in self._of_lost_links().values() for b, word in by.items() if b in mine]
        return [] if self._config.alone else [TellNodes(message=word) for word in words]

    def _judge(self, words: Mapping[str, Mapping[str, Suspected]]) -> list[Command]:
        cluster = self._cluster
        assert cluster.view is not None
        proposal = without_a_suspect(
            cluster.view,
            {member: set(by) for member, by in words.items()},
            holders=cluster.holders,
            answering={m.id for m in cluster.members if cluster.is_alive(m.id)},
            begun=cluster.progress.begun,
        )
        if proposal.view is None:  # deaths have been proven meanwhile
            return []
        link_lost = any(word.link_lost for by in words.values() for word in by.values())
        renews = link_lost and not self._tried_new_links()
        if renews:
            proposal = with_new_links(cluster.view, proposal)
        log = Log(
            event="new_links" if renews else "end_suspect", fields={"reason": proposal.reason}, say=proposal.reason
        )
        assert proposal.view is not None
        return [log, *self._view_changes.propose(proposal.view)]

    def _tried_new_links(self) -> bool:
        """Return True if nothing has been committed since all links were made anew."""
        cluster = self._cluster
        return bool(cluster.view and cluster.view.links_since) and cluster.progress.is_as_with_new_links
