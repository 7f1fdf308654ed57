"""Changes of other nodes: how they come, fall silent and die, and what this agent hears of their members.

A node is proven dead if its lease is gone and its agent answers no node that has a lease, or if a newer node has its
name. All other nodes are only silent. When one agent asks about a node in its key, the others answer in their keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastrain.job.world import View
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.core.cluster import Cluster, PeerNode
from elastrain.launcher.core.deadlines import Deadlines, MeetDue, SilenceDue
from elastrain.launcher.core.failures import ScriptFailures, death
from elastrain.launcher.core.rendezvous import Parking
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.core.suspicions import IndirectProbes, ProbeResult
from elastrain.launcher.core.view_changes import ViewChanges
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.shared.job_values import Command, Log, PutRecord, TellNodes, signature_of
from elastrain.launcher.shared.notices import Digested, Ended, Exited, Left, Notice, Stands
from elastrain.launcher.shared.times import wrong_clock
from elastrain.protocol.agent_messages import Suspect
from elastrain.protocol.handlers import handles

_REGROUP_S = 3.0
"""Time for the other links to come back after the first one does, on a node that was cut off itself."""
_WORD_S = 30.0
"""Time within which an agent with a living key has answered a question about a node."""
_SLEPT_S = 2.5
"""An agent that has not looked at its workers for this time stood still itself, and sent no heartbeats."""


class PeerChanges(ev.AgentPart):
    """The part that keeps `Cluster.peers` up to date and decides what follows."""

    def __init__(
        self,
        cluster: Cluster,
        deadlines: Deadlines,
        *,
        shutdown: Shutdown,
        parking: Parking,
        script: ScriptFailures,
        view_changes: ViewChanges,
    ) -> None:
        self._cluster, self._config, self._peers = cluster, cluster.config, cluster.peers
        self._deadlines, self._shutdown, self._parking = deadlines, shutdown, parking
        self._script, self._view_changes = script, view_changes
        self._vouching = IndirectProbes(cluster.peers)
        self._looked_s: float | None = None

    @handles(ev.NodeCame)
    def on_came(self, event: ev.NodeCame, now: float) -> list[Command]:
        """Handle a new or changed record of a node. A new incarnation proves that the earlier one is dead."""
        record = event.record
        known = self._peers.nodes.get(record.name)
        if self._shutdown.end is not None or record.name == self._config.node:
            return []
        if known is not None and known.record.incarnation == record.incarnation:
            # The lease may have lapsed during a store outage and be renewed: it is the same start of the node, and
            # nothing is lost.
            known.renew(record)
            return self._weigh(now) + self._view_changes.settle(now)
        commands: list[Command] = [Log(event="node", fields={"node": record.name, "incarnation": record.incarnation})]
        if known is not None:  # no worker outlives its agent, and a name belongs to one agent at a time
            commands += self._lose_node(known, "its name is taken by its successor", now)
        self._peers.add(record)
        # Members that were considered dead with the lease may be alive. Their agent will report those that are not.
        self._peers.back_to_life(self._members_of(record.name))
        return commands + self._weigh(now) + self._view_changes.settle(now)

    @handles(ev.LeaseEnded)
    def on_lease_ended(self, event: ev.LeaseEnded, now: float) -> list[Command]:
        """Handle the end of a node's lease. The node is dead unless its agent answers, or answers another node."""
        peer = self._peers.nodes.get(event.node)
        if self._shutdown.end is not None or peer is None:
            return []
        peer.lose_lease()
        log = Log(event="lease_gone", fields={"node": event.node, "linked": peer.linked})
        if peer.linked:  # the node lives: the store has lost only its key
            return [log, *self._weigh(now)]
        if not peer.met:  # the node may only be slow
            self._deadlines.set(MeetDue(event.node), now + self._config.times.meet_s)
            return [log]
        commands: list[Command] = [log]
        for each in self._peers.in_doubt():
            commands += self._doubt_peer(each, "its lease is gone", now)
        return commands

    @handles(MeetDue)
    def on_not_met(self, due: MeetDue, now: float) -> list[Command]:
        """Doubt a node that has no key and did not answer in time.

        At the second deadline it is lost, unless others reach it.
        """
        peer, is_away = self._peers.nodes.get(due.node), self._parking.store_away_since_s is not None
        if peer is not None and not peer.is_silent:  # the node came back in time
            return []
        # the store is away, so a missing key proves nothing
        if is_away and (peer is None or due.node in self._vouching.nodes):
            self._deadlines.set(
                due, now + (_WORD_S if due.node in self._vouching.nodes else self._config.times.absent_s)
            )
            return []
        if due.node in self._vouching.nodes:
            reached = self._vouching.word_on(due.node) is ProbeResult.REACHED
            return [] if reached else self._lose_missed({due.node: self._vouching.take(due.node)}, now)
        if peer is None:
            return self._doubt_absent(due.node, now)
        how = "does not answer" if peer.met else "was never reached"
        return self._doubt_peer(peer, f"its lease is gone, and its agent {how}", now)

    def _doubt_absent(self, name: str, now: float) -> list[Command]:
        """Doubt a node of the view that has no key and does not answer. It may have died before this node came."""
        starts = {member.incarnation for member in self._cluster.members if member.node == name}
        return self._doubt(name, signature_of(name, max(starts)), "no key, no answer", now) if starts else []

    def _doubt_peer(self, peer: PeerNode, why: str, now: float) -> list[Command]:
        # The job begins without it. Nothing is lost with a node whose port is closed and that has no members.
        if self._cluster.view is None or (peer.closed and not self._members_of(peer.record.name)):
            return self._lose_node(peer, why, now)
        return self._doubt(peer.record.name, peer.record.signature, why, now)

    def _doubt(self, name: str, signature: str, why: str, now: float) -> list[Command]:
        """Doubt a silent node. It is lost as soon as no other node with a lease reaches it."""
        if self._vouching.add(name, signature, why) is ProbeResult.OPEN:
            self._deadlines.set_first(MeetDue(name), now + _WORD_S)
        return self._weigh(now)

    def _weigh(self, now: float) -> list[Command]:
        """Lose the nodes that no node reaches any more.

        Update this node's key with its questions and answers about nodes.
        """
        before = self._vouching.nodes
        missed = self._vouching.take_missed()
        self._deadlines.drop(*(MeetDue(node) for node in before - self._vouching.nodes))
        commands = self._lose_missed(missed, now)
        if self._peers.change_record(said := self._vouching.record()):
            commands.append(PutRecord(record=said))
        return commands

    def _lose_missed(self, nodes: Mapping[str, str], now: float) -> list[Command]:
        commands: list[Command] = []
        for name, why in nodes.items():
            peer = self._peers.nodes.get(name)
            gone = self._members_of(name)
            lost = (
                self._lose_node(peer, why, now)
                if peer
                else self._lose_members(gone, why, now, missed_s=now - self._config.times.absent_s)
            )
            commands += lost
        return commands

    def _lose_node(self, peer: PeerNode, why: str, now: float) -> list[Command]:
        """Lose a node that is proven dead, with all its members."""
        name = peer.record.name
        self._peers.remove(name)
        if self._shutdown.end is not None:
            return []
        fields = {"node": name, "incarnation": peer.record.incarnation, "reason": why}
        commands: list[Command] = [Log(event="node_dead", fields=fields)]
        if self._cluster.view is None:
            return commands + self._view_changes.settle(now)
        return commands + self._lose_members(self._members_of(name), "lease", now, missed_s=now)

    def _members_of(self, name: str) -> list[str]:
        return [member.id for member in self._cluster.members if member.node == name]

    @handles(ev.NodeLeft)
    def on_node_left(self, event: ev.NodeLeft) -> list[Command]:
        """Handle the store's word that a node has left in good order."""
        return self.on_left(event.node)

    @handles(Left)
    def on_left(self, node: str) -> list[Command]:
        """Record that a node has left in good order."""
        self._peers.leave(node)
        return self._shutdown.look_at_digests_again()

    @handles(ev.LinkChanged)
    def on_link(self, event: ev.LinkChanged, now: float) -> list[Command]:
        """Handle a link that went up or down."""
        peer = self._peers.nodes.get(event.node)
        if self._shutdown.end is not None or peer is None or peer.linked == event.up:
            return []
        peer.link(up=event.up, closed=event.closed)
        log = Log(event="link", fields={"node": event.node, "up": event.up, "reason": event.reason})
        if not event.up and not event.closed:
            self._deadlines.set_first(SilenceDue(), now + self._config.times.silence_grace_s)
        if event.up and self._parking.parked is not None:
            self._regroup(now)
        commands: list[Command] = [log, *(self._news_for(event.node) if event.up else [])]
        # No sign of life is left. While the key exists the lease decides, because only the link may be broken.
        if peer.is_silent:
            commands += self._doubt_peer(peer, f"its lease is gone, and {event.reason}", now)
        return commands + self._weigh(now) + self._view_changes.settle(now)

    @handles(ev.ClockHeard)
    def on_clock(self, event: ev.ClockHeard) -> list[Command]:
        """Compare this host's clock with a peer's. If they differ, the node that came later does not begin."""
        peer, sentence = self._peers.nodes.get(event.node), wrong_clock(event.late_s, f"node {event.node}")
        if self._shutdown.end is not None or peer is None or not sentence:
            return []
        is_in = any(member.node == self._config.node for member in self._cluster.members)
        if is_in or self._config.incarnation < peer.record.incarnation:
            return [Log(event="clock", fields={"node": event.node, "late_s": event.late_s})]
        return self._shutdown.finish(1, sentence, everywhere=False)

    def _regroup(self, now: float) -> None:
        """Clear all suspicions for a while.

        The first node that answers again must not form a majority that removes the others.
        """
        for peer in self._peers.nodes.values():
            peer.suspect(False)
        self._deadlines.set(SilenceDue(), now + _REGROUP_S)

    def _news_for(self, name: str) -> list[Command]:
        """Return the notices that the other agent may have missed while the link was down."""
        workers = self._cluster.workers.by_id
        # Digests come first, because no agent waits for the digest of a member that is known to be gone.
        done = [(worker.id, worker.digest) for worker in workers.values() if not worker.raised]
        told: list[Notice] = [Digested(member=m, digest=digest) for m, digest in done if digest is not None]
        told += [Exited(member=m) for m in self._cluster.ids if m in workers and not workers[m].alive]
        commands = [*(TellNodes(message=notice, node=name) for notice in told), *self._script.notices_for(name)]
        view = self._cluster.view
        asks = self._peers.nodes[name].times_up
        commands += [TellNodes(message=Stands(view=view, asks=asks), node=name)] if view is not None else []
        return commands + ([TellNodes(message=Ended(), node=name)] if self._shutdown.finishing else [])

    def on_view(self, view: View, before: View | None, now: float) -> list[Command]:
        """Wait a limited time for the nodes of the view that this agent does not know. Lose closed ones outside it."""
        inside = {member.node for member in view.members}
        # A node that died before this one came has no key that could disappear. Only a deadline detects that.
        for name in inside - {self._config.node, *self._peers.nodes}:
            self._deadlines.set_first(MeetDue(name), now + self._config.times.absent_s)
        closed = {name for name, peer in self._peers.nodes.items() if peer.closed}
        outside = sorted((self._vouching.nodes & closed) - inside)
        self._deadlines.drop(*(MeetDue(name) for name in outside))
        lost = self._lose_missed({name: self._vouching.take(name) for name in outside}, now)
        return lost + (self._weigh(now) if outside else [])

    def on_look(self, event: ev.Looked, now: float) -> list[Command]:
        """Detect that this agent itself stood still for a while: the other nodes may have considered it dead."""
        slept = self._looked_s is not None and now - self._looked_s > _SLEPT_S
        self._looked_s = now
        for peer in self._peers.nodes.values() if slept else ():
            peer.lose_touch()
        return []

    @handles(Stands)
    def on_stands(self, node: str, notice: Stands, now: float) -> list[Command]:
        """Adopt the current view as another agent reports it, and answer with this agent's view if it asks.

        If the report answers a question asked since the link came up, and this agent has that view too, the other agent
        has not gone on without this node.
        """
        peer = self._peers.nodes.get(node)
        commands = self._view_changes.on_told(notice, now)
        view = self._cluster.view
        knows = view is not None and view.generation >= notice.view.generation
        if peer is not None:
            peer.tell_view(notice.answers, is_known=knows)
        if notice.asks and view is not None:
            commands.append(TellNodes(message=Stands(view=view, answers=notice.asks), node=node))
        return commands

    @handles(ev.StoreForgot)
    def on_store_forgot(self, event: ev.StoreForgot) -> list[Command]:
        """End this node if others may have gone on without it and ended, because the store no longer knows of that."""
        cluster, nodes = self._cluster, self._peers.nodes
        first = [record.name for record in cluster.roster.nodes] if cluster.roster is not None else []
        names = {member.node for member in cluster.members} or set(first)
        away = {name for name in names - event.nodes - {self._config.node} if name in nodes and not nodes[name].linked}
        # If no other node of the view or roster is present and this node is in no view, it cannot know how they went
        # on.
        unknown = sorted(name for name in away if nodes[name].lost_touch or not nodes[name].met or names == away)
        if not unknown or 2 * (len(names) - len(away)) > len(names):
            return []
        sentence = (
            f"the store has lost its data, and {', '.join(unknown)} may have gone on while this node could not be "
            "reached: no node can tell any more, and it ends. Start the job again, from a checkpoint if it has one"
        )
        return self._shutdown.finish(1, sentence, everywhere=False)

    @handles(SilenceDue)
    def on_silence(self, now: float) -> list[Command]:
        """Suspect all silent nodes together.

        A node that is cut off itself hears the others fall silent one after the other.
        """
        for peer in self._peers.nodes.values():
            peer.suspect(not peer.linked)
        return self._view_changes.settle(now)

    @handles(Exited)
    def on_exited(self, node: str, notice: Exited, now: float) -> list[Command]:
        """Handle the exit of a member on another node, as reported by its agent."""
        return self._lose_members([notice.member], f"notice of {node}", now)

    def on_seen_dead(self, by: Worker, message: Suspect, now: float) -> list[Command]:
        """Handle a death that a worker of this node has detected by a broken robust mutex on the same machine."""
        return self._lose_members([message.member], f"mutex, seen by {by.id}", now)

    def _lose_members(
        self, members: Sequence[str], source: str, now: float, *, missed_s: float | None = None
    ) -> list[Command]:
        """Lose members of other nodes that are proven dead.

        `missed_s`: when they fell silent, if silence is the only evidence.
        """
        # This agent has better proof about its own workers, and reports no death twice.
        others = [m for m in members if m not in self._cluster.workers.by_id]
        new = [m for m in others if m not in self._peers.dead_members]
        self._peers.take_for_dead(others if missed_s is None else new, presumed_s=missed_s)
        in_view = [m for m in new if m in self._cluster.ids]
        if not in_view or self._shutdown.end is not None:
            return []
        commands: list[Command] = [death(m, source, now, now) for m in in_view]
        return commands + self._view_changes.settle(now)
