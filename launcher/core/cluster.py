"""Who takes part in the job, as this agent sees it: its workers, the other nodes, the roster, the view; who lives.

State and questions about it; what follows from an event is decided by the parts that hold a `Cluster`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from elastrain.launcher.core.checkpoints import CheckpointCare
from elastrain.launcher.core.job_progress import JobProgress
from elastrain.launcher.core.peers import Peers
from elastrain.launcher.core.window import OpenWindow
from elastrain.launcher.core.worker_table import Worker, Workers
from elastrain.launcher.values import JobConfig, NodeRecord, Roster
from elastrain.world import Member, View


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
