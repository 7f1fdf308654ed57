"""Nodes that neither have a lease nor answer this one: others may reach them. They are asked, and answer, in the nodes'
own keys (`NodeRecord.asks`, `reaches`, `misses`).

Members that do not reach one another, though no death is proven.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from elastrain.decisions.membership import with_new_links, without_a_suspect
from elastrain.launcher.core.cluster import Cluster, Peers
from elastrain.launcher.core.deadlines import Deadlines, SuspicionDue
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.view_changes import ViewChanges
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.shared.job_values import Command, Log, NodeRecord, TellNodes
from elastrain.launcher.shared.notices import Suspected
from elastrain.protocol.agent_messages import Suspect


class ProbeResult(Enum):
    """What the nodes with leases say of one that has none and does not answer this one."""

    REACHED = auto()
    """It answers one of them: it lives, and has only lost the store."""
    MISSED = auto()
    """It answers none of them."""
    OPEN = auto()
    """Not all have said so yet."""


@dataclass(frozen=True, kw_only=True)
class DoubtedNode:
    """`signature`: of the start of the node. `why`: what would make it count as dead, were it asked alone."""

    signature: str
    why: str


class IndirectProbes:
    """Owns which nodes are doubted: they would be taken for dead if others did not still have a word to say."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._open: dict[str, DoubtedNode] = {}

    @property
    def nodes(self) -> set[str]:
        return set(self._open)

    def add(self, node: str, signature: str, why: str) -> ProbeResult:
        """Doubt a silent node, from the first reason on. Returns what others have said of it."""
        self._open.setdefault(node, DoubtedNode(signature=signature, why=why))
        return self.word_on(node)

    def word_on(self, node: str) -> ProbeResult:
        """What others say of a node that is doubted."""
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
        """Doubt it no more. Returns why it was doubted."""
        return self._open.pop(node).why

    def take_missed(self) -> dict[str, str]:
        """The nodes that nobody reaches, and why each was doubted. Who has answered meanwhile is doubted no more."""
        nodes = self._peers.nodes
        for node in [node for node in self._open if node in nodes and not nodes[node].is_silent]:
            self.take(node)
        return {node: self.take(node) for node in list(self._open) if self.word_on(node) is ProbeResult.MISSED}

    def record(self) -> NodeRecord:
        """This node's record, with what it asks the others now, and what it answers them."""
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


class Suspicions:
    """Owns who is suspected by whom, until that is judged."""

    def __init__(
        self, cluster: Cluster, deadlines: Deadlines, *, shutdown: Shutdown, view_changes: ViewChanges
    ) -> None:
        self._cluster, self._config = cluster, cluster.config
        self._deadlines, self._shutdown, self._view_changes = deadlines, shutdown, view_changes
        self._by_member: dict[str, dict[str, Suspected]] = {}

    def on_suspect(self, by: Worker, message: Suspect, now: float) -> list[Command]:
        """Handle the word of a worker of this node that it does not reach another member."""
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

    def on_suspected(self, node: str, notice: Suspected, now: float) -> list[Command]:
        """Handle the same word of a worker of another node."""
        return self._note(notice, now)

    def forget(self, member: str) -> None:
        """Drop what the dead member said, and what was said of it."""
        self._keep({m for m in self._cluster.ids if m != member})

    def _keep(self, members: Collection[str]) -> None:
        """Keep what these members have said of each other, but for links that were made anew since."""
        rest = {
            member: {b: word for b, word in by.items() if b in members and not self._is_of_old_links(word)}
            for member, by in self._by_member.items()
            if member in members
        }
        self._by_member = {member: by for member, by in rest.items() if by}

    def _is_of_old_links(self, word: Suspected) -> bool:
        """Whether a suspicion is about links from before the view's: both ends close these, each at its own time."""
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
        # A death is proven within milliseconds; what is still alive after this time has lost its links, not its life.
        self._deadlines.set_first(SuspicionDue(), now + self._config.times.suspicion_s)
        return [] if known else [Log(event="suspect", fields={"member": member, "by": by, "reason": notice.reason})]

    def on_due(self, due: SuspicionDue, now: float) -> list[Command]:
        """One agent chooses, and the store takes one view of each generation: two members are never ended at once."""
        cluster = self._cluster
        if cluster.view is None or self._shutdown.finishing:
            self._by_member = {}
            return []
        self._keep([m for m in cluster.ids if cluster.is_alive(m)])
        if self._by_member:
            self._deadlines.set(SuspicionDue(), now + self._config.times.suspicion_s)
        # What stands next may already be without one of them. And silence has its own judgement: what is said by and of
        # nodes that do not answer is out of date, or as good when they do again.
        if self._view_changes.proposing or cluster.unlinked_nodes():
            return self._tell_again()
        words, self._by_member = self._by_member, self._of_lost_links()
        return self._judge(words) if cluster.first_answering_node() == self._config.node else self._tell_again()

    def _of_lost_links(self) -> dict[str, dict[str, Suspected]]:
        """Suspicions that hold until links are made anew or one end dies. Others are repeated while they hold."""
        return {
            member: lost
            for member, by in self._by_member.items()
            if (lost := {b: word for b, word in by.items() if word.link_lost})
        }

    def _tell_again(self) -> list[Command]:
        """Tell again what members of this node have said of lost links: who chooses may not have been reached."""
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
        """Whether nothing has been committed since all links were made anew."""
        cluster = self._cluster
        return bool(cluster.view and cluster.view.links_since) and cluster.progress.is_as_with_new_links
