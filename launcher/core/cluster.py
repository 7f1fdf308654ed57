"""The other nodes as this agent sees them, this node's own record, and which members elsewhere are proven dead.

Who takes part in the job, as this agent sees it: its workers, the other nodes, the roster, the view; who lives.

State and questions about it; what follows from an event is decided by the parts that hold a `Cluster`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastrain.job.world import Member, View
from elastrain.launcher.core.progress import CheckpointCare, JobProgress, OpenWindow
from elastrain.launcher.core.worker_table import Worker, Workers
from elastrain.launcher.shared.job_values import JobConfig, NodeRecord, Roster


@dataclass(kw_only=True)
class PeerNode:
    """Another node, as this agent sees it."""

    record: NodeRecord
    linked: bool = False
    """Its agent answers."""
    met: bool = False
    """It has answered at least once."""
    leaving: bool = False
    """It goes at the end of the step that its members are in."""
    suspected: bool = False
    """It has not answered for long enough: its members may be removed by a majority."""
    lost_touch: bool = False
    """It may have taken this node for dead since it last said which view stands."""
    times_up: int = 0
    """How often its agent has begun to answer."""
    tells_view: bool = False
    """Since it was linked it has said which view stands: that is in the store, or it puts it there again."""
    leased: bool = True
    """Its lease is alive, as far as the store says."""

    @property
    def is_silent(self) -> bool:
        """It neither has a lease nor answers."""
        return not (self.leased or self.linked)


class Peers:
    """Owns the other nodes; `record` is what this node says of itself."""

    def __init__(self, record: NodeRecord) -> None:
        self.record = record
        self.nodes: dict[str, PeerNode] = {}
        self.left: set[tuple[str, int]] = set()
        """Nodes (name, incarnation) that have gone in good order."""
        self.dead_members: set[str] = set()
        """Members of other nodes that are proven dead."""
        self._presumed_s: dict[str, float] = {}
        """Of these, whose death was concluded from the silence of their node and its missing key; and since when."""

    def present(self) -> list[NodeRecord]:
        """The nodes that are there, this one too, in the order in which they came."""
        # A node whose lease has ended may be slow, but no job should begin with it.
        present = [self.record, *(peer.record for peer in self.nodes.values() if peer.leased)]
        return sorted(present, key=lambda record: record.incarnation)

    def known(self) -> list[NodeRecord]:
        """The nodes not known to be dead, this one too, whatever their leases."""
        return [self.record, *(peer.record for peer in self.nodes.values())]

    def in_doubt(self) -> list[PeerNode]:
        """Nodes that were met, and neither have a lease nor answer."""
        return [peer for peer in self.nodes.values() if peer.met and peer.is_silent]

    def take_for_dead(self, members: Collection[str], *, presumed_s: float | None = None) -> None:
        """`presumed_s`: since when they were missed, where that is all that is known of their deaths."""
        self.dead_members.update(members)
        for member in members:
            self._presumed_s.pop(member, None)
            if presumed_s is not None:
                self._presumed_s[member] = presumed_s

    def presumed_since_s(self, members: Collection[str]) -> float | None:
        """Since when the last of these is missed whose deaths were concluded from silence; None without any."""
        return max((at_s for member, at_s in self._presumed_s.items() if member in members), default=None)

    def back_to_life(self, members: Collection[str]) -> None:
        for member in members:
            self.dead_members.discard(member)
            self._presumed_s.pop(member, None)

    def open_again(self, members: Collection[str]) -> None:
        """Let these members' deaths be concluded anew, where they were concluded from silence.

        Another agent has put them into a view since: whoever that was lived, and may be the one of any of them.
        """
        self.back_to_life(self._presumed_s.keys() & set(members))

    def answering(self) -> set[tuple[str, int]]:
        """The nodes (name, incarnation) whose agents answer."""
        return {(p.record.name, p.record.incarnation) for p in self.nodes.values() if p.linked}

    def leave(self, name: str) -> None:
        """Note that a node has gone in good order: nothing is lost with it."""
        if name in self.nodes:
            self.left.add((name, self.nodes[name].record.incarnation))


class Cluster:
    """One picture for all parts: only an event's own part changes it."""

    def __init__(self, config: JobConfig) -> None:
        self.config = config
        self.workers = Workers()
        record = NodeRecord(
            name=config.node, incarnation=config.incarnation, workers=config.workers, offers=config.life.offers
        )
        self.peers = Peers(record)
        self.progress = JobProgress()
        self.window = OpenWindow()
        self.checkpoints = CheckpointCare(config.life.number, self.progress)
        self.roster: Roster | None = None
        self.view: View | None = None
        self.spared_by_node: dict[str, tuple[str, ...]] = {}
        """Members that stand still, and are not ended because they alone hold some state."""

    @property
    def first_rank(self) -> int | None:
        """The lowest rank of this node's workers; None while there is no roster, and for a node that came late."""
        me = self.config
        return None if self.roster is None else self.roster.first_rank(me.node, me.incarnation)

    @property
    def late(self) -> bool:
        """Whether this node came when the job had begun."""
        return self.roster is not None and self.first_rank is None

    @property
    def holders(self) -> Mapping[str, Sequence[str]] | None:
        """The holders of each shard, as this node's living members of the view last told them; None if none has yet.

        Words of members that are gone are out of date: they count for nothing.
        """
        told = [w.progress for w in self.mine_in_view() if w.progress.holders is not None]
        return max(told, key=lambda progress: progress.step or 0).holders if told else None

    def as_member(self, worker: Worker) -> Member:
        here = self.config
        return Member(id=worker.id, node=here.node, address=worker.address, incarnation=here.incarnation)

    def first_unused_number(self) -> int:
        """The lowest number above those of all members that this agent has heard of."""
        initial = self.roster.first_member + self.roster.workers if self.roster is not None else 0
        known = [*self.workers.by_id, *self.ids]
        return max([initial, *(int(member.removeprefix("m")) + 1 for member in known)])

    @property
    def members(self) -> tuple[Member, ...]:
        """The view's members in rank order; nobody before the first view."""
        return self.view.members if self.view else ()

    @property
    def ids(self) -> tuple[str, ...]:
        return self.view.ids if self.view else ()

    def is_alive(self, member: str) -> bool:
        """Whether no proof of the member's death is known."""
        worker = self.workers.by_id.get(member)
        if worker is not None:  # this agent reaps it: nobody knows better
            return worker.alive
        return member not in self.peers.dead_members and not self._is_of_a_former_start(member)

    def _is_of_a_former_start(self, member: str) -> bool:
        """Whether the member's node has been started again since: no worker outlives its agent."""
        known = next((m for m in self.members if m.id == member), None)
        if known is None:
            return False
        there = self.peers.nodes.get(known.node)
        # Of its own node's name in the view, but none of its workers: of the agent that it succeeds.
        return known.node == self.config.node or (there is not None and there.record.incarnation > known.incarnation)

    def alive_in_view(self) -> list[str]:
        return [m for m in self.ids if self.is_alive(m)]

    def gone_from_view(self) -> list[str]:
        """Members of the view that are proven dead."""
        return [m for m in self.ids if not self.is_alive(m)]

    def mine_in_view(self) -> list[Worker]:
        """This node's living members, in rank order."""
        found = [self.workers.by_id[m] for m in self.ids if m in self.workers.by_id]
        return [worker for worker in found if worker.alive]

    def is_needed(self, member: str, besides: Collection[str] = ()) -> bool:
        """Whether it is the last living holder of some shard, not counting `besides`: without it the job would end."""
        left = set(self.alive_in_view()) - {member, *besides}
        if not self.progress.begun:
            return not left
        return not left or any(left.isdisjoint(having) for having in (self.holders or {}).values())

    @property
    def spared(self) -> list[str]:
        """Members, of any node, for which all others wait: they stand still, and nobody else has their state."""
        told = {member for members in self.spared_by_node.values() for member in members}
        return sorted(member for member in told.intersection(self.ids) if self.is_alive(member))

    def unfinished(self) -> list[Worker]:
        return [worker for worker in self.mine_in_view() if not worker.finished]

    def unlinked_nodes(self) -> set[str]:
        """Nodes with members in the view whose agents do not answer."""
        # A node that is not known is one of which nothing has been heard yet, or that is dead.
        names = {member.node for member in self.members} - {self.config.node}
        nodes = self.peers.nodes
        return {name for name in names if name not in nodes or not nodes[name].linked}

    def others_go_on(self) -> bool:
        """Whether there are members on another node that answers and does not leave."""
        nodes, there = self.peers.nodes, {m.node for m in self.members if self.is_alive(m.id)} - self.unlinked_nodes()
        return any(name in nodes and not nodes[name].leaving for name in there)

    def others_stay(self) -> bool:
        """Whether another node answers and does not leave, though its workers may only be on their way to the view."""
        return any(peer.linked and not peer.leaving for peer in self.peers.nodes.values())

    def first_answering_node(self) -> str:
        """Of the nodes with members in the view; this one if there are none."""
        unlinked = self.unlinked_nodes()
        return next((m.node for m in self.members if m.node not in unlinked), self.config.node)
