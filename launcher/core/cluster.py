"""The members and nodes of the job as this agent sees them: workers, other nodes, roster, view, and who is alive.

This file holds state and answers questions about it. Other parts decide what follows from an event.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastrain.job.world import Member, View
from elastrain.launcher.core.places.quarantine import Quarantine
from elastrain.launcher.core.progress import CheckpointCare, DeviceFailures, JobProgress, OpenWindow
from elastrain.launcher.core.watching.members_work import MembersWork
from elastrain.launcher.core.worker_table import Worker, Workers
from elastrain.launcher.shared.job_values import JobConfig, NodeRecord, Roster


@dataclass(kw_only=True)
class PeerNode:
    """Another node, as this agent sees it."""

    record: NodeRecord
    linked: bool = False
    """True while its agent answers on the link."""
    met: bool = False
    """True once its agent has answered at least once."""
    leaving: bool = False
    """True if the node leaves at the end of the current step."""
    suspected: bool = False
    """True if the node has been silent for so long that a majority may remove its members."""
    lost_touch: bool = False
    """True if the node may have considered this one dead since it last reported its view."""
    times_up: int = 0
    """Number of times that its agent has begun to answer."""
    tells_view: bool = False
    """True if the node has reported its view since the link came up.

    The view is then in the store, or the node puts it there again.
    """
    closed: bool = False
    """True if the link is down because the node's machine refuses its agent's port."""
    leased: bool = True
    """True while its lease is alive, according to the store."""

    def renew(self, record: NodeRecord) -> None:
        """Take over a changed record of the same start, which has a lease."""
        self.record, self.leased = record, True

    def lose_lease(self) -> None:
        """Record that the lease has ended."""
        self.leased = False

    def link(self, *, up: bool, closed: bool) -> None:
        """Record that the link went up, or down. `closed`: the machine itself reports that the agent is gone."""
        # A closed port counts like a long silence.
        self.linked, self.closed = up, closed and not up
        self.suspected = self.closed
        self.met, self.tells_view = self.met or up, False
        self.times_up += up
        # A node that stayed linked until its port closed has always heard this one, so this agent knows all that it
        # knew.
        self.lost_touch = self.lost_touch or not (up or closed)

    def tell_view(self, answers: int, *, is_known: bool) -> None:
        """Record that the node has reported its view, and that this agent has that view too (`is_known`)."""
        self.tells_view = True
        self.lost_touch = self.lost_touch and not (is_known and answers == self.times_up)

    def begin_to_leave(self) -> None:
        """Record that the node leaves at the end of the current step."""
        self.leaving = True

    def suspect(self, is_suspected: bool) -> None:
        """Begin or stop to suspect the node."""
        self.suspected = is_suspected

    def lose_touch(self) -> None:
        """Record that the node may have considered this one dead."""
        self.lost_touch = True

    @property
    def is_silent(self) -> bool:
        """True if the node neither has a lease nor answers."""
        return not (self.leased or self.linked)


class Peers:
    """The other nodes. `record` is this node's own record."""

    def __init__(self, record: NodeRecord) -> None:
        self.record = record
        self.nodes: dict[str, PeerNode] = {}
        self.left: set[tuple[str, int]] = set()
        """Nodes (name, incarnation) that have left in good order."""
        self.dead_members: set[str] = set()
        """Members of other nodes that are proven dead."""
        self._presumed_s: dict[str, float] = {}
        """Dead members whose death was only concluded from silence -> monotonic time since which they are missed."""

    def change_record(self, record: NodeRecord) -> bool:
        """Change this node's own record. Returns True if it differs from the last one."""
        before, self.record = self.record, record
        return record != before

    def add(self, record: NodeRecord) -> None:
        """Add another node, or replace the earlier node of this name."""
        self.nodes[record.name] = PeerNode(record=record)

    def remove(self, name: str) -> None:
        """Remove a node: one that comes again under this name is a new one."""
        self.nodes.pop(name, None)

    def present(self) -> list[NodeRecord]:
        """Return the records of this node and all nodes with a lease, in the order of their start."""
        # A node whose lease has ended may only be slow, but no job should begin with it.
        present = [self.record, *(peer.record for peer in self.nodes.values() if peer.leased)]
        return sorted(present, key=lambda record: record.incarnation)

    def known(self) -> list[NodeRecord]:
        """Return the records of this node and of all nodes that are not known to be dead, with or without a lease."""
        return [self.record, *(peer.record for peer in self.nodes.values())]

    def in_doubt(self) -> list[PeerNode]:
        """Return the nodes that were met once and now neither have a lease nor answer."""
        return [peer for peer in self.nodes.values() if peer.met and peer.is_silent]

    def take_for_dead(self, members: Collection[str], *, presumed_s: float | None = None) -> None:
        """Record members of other nodes as dead.

        `presumed_s`: time since which they are missed, if silence is the only evidence.
        """
        self.dead_members.update(members)
        for member in members:
            self._presumed_s.pop(member, None)
            if presumed_s is not None:
                self._presumed_s[member] = presumed_s

    def presumed_since_s(self, members: Collection[str]) -> float | None:
        """Return the time since which the last of these members presumed dead is missed. None without such members."""
        return max((at_s for member, at_s in self._presumed_s.items() if member in members), default=None)

    def back_to_life(self, members: Collection[str]) -> None:
        """Record that these members are alive after all."""
        for member in members:
            self.dead_members.discard(member)
            self._presumed_s.pop(member, None)

    def open_again(self, members: Collection[str]) -> None:
        """Withdraw the deaths of these members that were concluded only from silence.

        Another agent has put them into a view since, so at least one of them was alive. Each death must be concluded
        again.
        """
        self.back_to_life(self._presumed_s.keys() & set(members))

    def answering(self) -> set[tuple[str, int]]:
        """Return the nodes (name, incarnation) whose agents answer."""
        return {(p.record.name, p.record.incarnation) for p in self.nodes.values() if p.linked}

    def leave(self, name: str) -> None:
        """Record that a node has left in good order, so that nothing is lost with it."""
        if name in self.nodes:
            self.left.add((name, self.nodes[name].record.incarnation))


class Cluster:
    """The one picture of the job that all parts share. The part that handles an event changes it by its methods."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.workers = Workers()
        record = NodeRecord(
            name=config.node, incarnation=config.incarnation, workers=config.workers, offers=config.life.offers
        )
        self.peers = Peers(record)
        self.progress = JobProgress()
        self.work = MembersWork(alone=config.alone)
        self.window = OpenWindow()
        self.checkpoints = CheckpointCare(config.life.number, self.progress)
        self.devices = DeviceFailures(config.life.device_failures)
        self.quarantine = Quarantine(config)
        self.roster: Roster | None = None
        self.view: View | None = None
        self._spared_by_node: dict[str, tuple[str, ...]] = {}
        """Members, by node, that hang but are not killed because they are the only holders of some state."""

    def begin_with(self, roster: Roster) -> None:
        """Adopt the roster."""
        self.roster = roster

    def enter(self, view: View) -> None:
        """Adopt a view."""
        self.view = view

    def spare(self, node: str, members: tuple[str, ...]) -> bool:
        """Wait for these hanging members of a node. Returns True if they are not those of its last report."""
        before, self._spared_by_node[node] = self._spared_by_node.get(node), members
        return members != before

    def spare_no_longer(self, node: str) -> None:
        """Stop waiting for hanging members of a node."""
        self._spared_by_node.pop(node, None)

    @property
    def first_rank(self) -> int | None:
        """The lowest rank of this node's workers. None without a roster, or if this node is not in it."""
        me = self.config
        return None if self.roster is None else self.roster.first_rank(me.node, me.incarnation)

    @property
    def late(self) -> bool:
        """True if this node came after the job had begun."""
        return self.roster is not None and self.first_rank is None

    @property
    def holders(self) -> Mapping[str, Sequence[str]] | None:
        """The holders of each shard, as last reported by this node's living members of the view. None without a report.

        Reports of members that are gone are out of date and do not count.
        """
        told = [w.progress for w in self.mine_in_view() if w.progress.holders is not None]
        return max(told, key=lambda progress: progress.step or 0).holders if told else None

    def as_member(self, worker: Worker) -> Member:
        """Return the member that stands for this node's worker in a view."""
        here = self.config
        return Member(id=worker.id, node=here.node, address=worker.address, incarnation=here.incarnation)

    def first_unused_number(self) -> int:
        """Return the lowest number above those of all members that this agent has heard of."""
        initial = self.roster.first_member + self.roster.workers if self.roster is not None else 0
        known = [*self.workers.by_id, *self.ids]
        return max([initial, *(int(member.removeprefix("m")) + 1 for member in known)])

    @property
    def members(self) -> tuple[Member, ...]:
        """The view's members in rank order. Empty before the first view."""
        return self.view.members if self.view else ()

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the view's members in rank order. Empty before the first view."""
        return self.view.ids if self.view else ()

    def is_alive(self, member: str) -> bool:
        """Return True unless there is proof of the member's death."""
        worker = self.workers.by_id.get(member)
        if worker is not None:  # this agent is the worker's parent and knows best
            return worker.alive
        return member not in self.peers.dead_members and not self._is_of_a_former_start(member)

    def _is_of_a_former_start(self, member: str) -> bool:
        """Return True if the member's node was started again since. No worker outlives its agent."""
        known = self.view.by_id.get(member) if self.view is not None else None
        if known is None:
            return False
        there = self.peers.nodes.get(known.node)
        # If it is on this node but none of its workers, an earlier agent of this node started it.
        return known.node == self.config.node or (there is not None and there.record.incarnation > known.incarnation)

    def alive_in_view(self) -> list[str]:
        """Return the members of the view that are not proven dead, in rank order."""
        return [m for m in self.ids if self.is_alive(m)]

    def gone_from_view(self) -> list[str]:
        """Return the members of the view that are proven dead."""
        return [m for m in self.ids if not self.is_alive(m)]

    def mine_in_view(self) -> list[Worker]:
        """Return this node's living members of the view, in rank order."""
        found = [self.workers.by_id[m] for m in self.ids if m in self.workers.by_id]
        return [worker for worker in found if worker.alive]

    def is_needed(self, member: str, besides: Collection[str] = ()) -> bool:
        """Return True if the job would end without this member.

        Then it is the last living member, or the last living holder of some shard, if the members in `besides` are not
        counted.
        """
        left = set(self.alive_in_view()) - {member, *besides}
        if not self.progress.begun:
            return not left
        return not left or any(left.isdisjoint(having) for having in (self.holders or {}).values())

    @property
    def spared(self) -> list[str]:
        """Members of any node that hang but are waited for, because they hold the only copy of some state."""
        told = {member for members in self._spared_by_node.values() for member in members}
        return sorted(member for member in told.intersection(self.ids) if self.is_alive(member))

    def unfinished(self) -> list[Worker]:
        """Return this node's living members of the view that have not passed the end of the job."""
        return [worker for worker in self.mine_in_view() if not worker.finished]

    def unlinked_nodes(self) -> set[str]:
        """Return the nodes with members in the view whose agents do not answer."""
        # An unknown node is one that has not been heard of yet, or that is dead.
        names = {member.node for member in self.members} - {self.config.node}
        nodes = self.peers.nodes
        return {name for name in names if name not in nodes or not nodes[name].linked}

    def others_go_on(self) -> bool:
        """Return True if a living member is on another node that answers and is not leaving."""
        nodes, there = self.peers.nodes, {m.node for m in self.members if self.is_alive(m.id)} - self.unlinked_nodes()
        return any(name in nodes and not nodes[name].leaving for name in there)

    def others_stay(self) -> bool:
        """Return True if another node answers and is not leaving. Its workers may not be in the view yet."""
        return any(peer.linked and not peer.leaving for peer in self.peers.nodes.values())

    def first_answering_node(self) -> str:
        """Return the first node with members in the view that answers, in rank order, or this node if there is none."""
        unlinked = self.unlinked_nodes()
        return next((m.node for m in self.members if m.node not in unlinked), self.config.node)
