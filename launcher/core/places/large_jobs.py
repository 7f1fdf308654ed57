"""Decisions of a job of many nodes: which of them propose a change of the view, and which others each one tells."""

from __future__ import annotations

from elastrain.job.world import View
from elastrain.launcher.core.cluster import Cluster

SMALL_NODES = 8
"""Largest number of nodes that all propose a change of the view, and tell each other of it."""
FIRST_NODES = 3
"""Number of nodes of a larger job that propose a change at once."""


def goes_first(cluster: Cluster, view: View, proposed: View) -> bool:
    """Return True unless other nodes, earlier in the view, see the same change and answer.

    In a large job a few proposals suffice. A node always proposes changes of its own members.
    """
    if len(view.members) <= SMALL_NODES:
        return True
    here, nodes = cluster.config.node, cluster.peers.nodes
    order = list(dict.fromkeys(member.node for member in view.members))
    changed = {member.node for member in {*view.members} ^ {*proposed.members}}
    if len(order) <= SMALL_NODES or here in changed or here not in order:
        return True
    before = order[: order.index(here)]
    return sum(name in nodes and nodes[name].linked for name in before) < FIRST_NODES


def nodes_to_tell(cluster: Cluster) -> list[str | None]:
    """Return the nodes that this one tells of a view; [None] stands for all of them.

    In a large job each node tells those whose distance in the order of nodes is a power of two. They tell others
    in turn, so that a node outside the store's reach hears of a view from several nodes.
    """
    names = sorted({cluster.config.node, *cluster.peers.nodes})
    if len(names) <= SMALL_NODES:
        return [] if cluster.config.alone else [None]
    mine = names.index(cluster.config.node)
    distances = [1 << power for power in range((len(names) - 1).bit_length())]
    return [names[(mine + distance) % len(names)] for distance in distances]
