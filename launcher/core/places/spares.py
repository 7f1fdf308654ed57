"""Spare nodes: they join the job and wait without workers, until a node that computes is lost or leaves.

Every agent sees the same records, so the spares agree without a vote: as many spares as there are free places begin,
in the order of their start. Each writes into its record that it no longer waits.
"""

from __future__ import annotations

from dataclasses import replace

from elastrain.launcher.core.agent_events import AgentPart
from elastrain.launcher.core.cluster import Cluster, PeerNode
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.shared.job_values import Command, Log, PutRecord, TakeNumber


class Spares(AgentPart):
    """The wait of a spare node for a place."""

    def __init__(self, cluster: Cluster, shutdown: Shutdown) -> None:
        self._cluster, self._shutdown = cluster, shutdown
        self._computed: set[str] = set()
        """The other nodes that computed when this agent looked last."""
        self._lost: set[str] = set()
        """Nodes that computed once and do not now."""

    def follow_up(self) -> list[Command]:
        """Start this node's workers if it waits and a place is free for it."""
        cluster, record = self._cluster, self._cluster.peers.record
        if not record.spare:
            return []
        before, self._computed = self._computed, set(computing(cluster))
        self._lost = (self._lost | before) - self._computed
        if self._shutdown.end is not None or self._shutdown.finishing or not _may_begin(cluster):
            return []
        earlier = [p for p in _spares(cluster) if p.record.incarnation < record.incarnation]
        if len(earlier) >= free_places(cluster):
            return []
        cluster.peers.change_record(replace(record, spare=False))
        cluster.workers.open_slots(cluster.config.workers)
        lost = sorted(self._lost)
        place = f"the place of {', '.join(lost)}" if lost else "a free place"
        say = f"the spare {record.name} takes {place}: its workers start"
        return [
            Log(event="spare_begins", fields={"node": record.name, "lost": lost}, say=say),
            PutRecord(record=cluster.peers.record),
            *(TakeNumber() for _ in range(cluster.config.workers)),
        ]


def wait_as_spare(cluster: Cluster) -> list[Command]:
    """Let this node, which has no workers, wait for a place."""
    there, record = computing(cluster), cluster.peers.record
    cluster.peers.change_record(replace(record, spare=True, ready=()))
    most, is_full = cluster.config.places.nodes, free_places(cluster) <= len(_spares(cluster))
    say = f"{record.name} waits as a spare: the job has all its {most} nodes ({', '.join(there)})" if is_full else ""
    return [
        Log(event="spare_waits", fields={"node": record.name}, say=say),
        PutRecord(record=cluster.peers.record),
    ]


def has_to_wait(cluster: Cluster) -> bool:
    """Return True if this node, which came late or comes back, has to wait as a spare.

    The spares that wait already come first: they may be about to begin. Before the first view this agent may not have
    heard of all nodes of the roster.
    """
    is_free = cluster.view is not None and free_places(cluster) > len(_spares(cluster))
    return cluster.config.places.spares > 0 and not is_free


def free_places(cluster: Cluster) -> int:
    """Return the number of nodes that lack until MAX nodes compute, without this node."""
    return cluster.config.places.nodes - len(computing(cluster))


def computing(cluster: Cluster) -> list[str]:
    """Return the other nodes that compute or are about to, in the order of their start."""
    known = cluster.peers.nodes
    nodes = sorted(known.values(), key=lambda peer: peer.record.incarnation)
    # Nodes of the view that this agent has not heard of yet.
    alive = {member.node for member in cluster.members if cluster.is_alive(member.id)}
    unheard = alive - known.keys() - {cluster.config.node}
    return [peer.record.name for peer in nodes if _computes(cluster, peer)] + sorted(unheard)


def _computes(cluster: Cluster, peer: PeerNode) -> bool:
    record = peer.record
    if record.spare or peer.leaving or (record.name, record.incarnation) in cluster.peers.left:
        return False
    if peer.linked:
        return True
    # The other nodes have removed its members, or it had none. Its lease may take seconds to end.
    is_out = cluster.view is not None and record.name not in {member.node for member in cluster.members}
    return peer.leased and not (peer.suspected and is_out)


def _spares(cluster: Cluster) -> list[PeerNode]:
    return [peer for peer in cluster.peers.nodes.values() if peer.record.spare and (peer.leased or peer.linked)]


def _may_begin(cluster: Cluster) -> bool:
    """Return True once the job has a view, or no node is left that could make the first one.

    Workers of a script without `job.steps` have no view: they can only be started again together.
    """
    return cluster.view is not None or not computing(cluster)
