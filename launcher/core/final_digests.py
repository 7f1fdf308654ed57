"""The last net: the digests of the parameters with which members have passed the end, compared over all nodes."""

from __future__ import annotations

from elastrain.launcher.core.cluster import Cluster


class FinalDigests:
    """Compares the digests of all members at the end: whatever has parted two of them, such a job has no result."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._by_member: dict[str, str] = {}

    def add(self, member: str, digest: str) -> str:
        """Add a member's digest. Returns a sentence that names two members whose digests differ; empty if none do.

        An empty one is told by a member that has a part of the parameters only.
        """
        known = self._by_member
        known[member] = digest
        other = next((m for m, its in known.items() if its != digest and its and digest), None)
        if other is None:
            return ""
        return (
            f"the parameters at the end differ: {other} has the digest {known[other]}, {member} has {digest}; "
            "neither can be trusted: something outside of the optimizer has changed them on one member, or a device "
            "computes wrongly"
        )

    def to_come(self) -> list[str]:
        """Living members of the view, on nodes that answer and have not left, whose digests are not known yet."""
        cluster = self._cluster
        away, left = cluster.unlinked_nodes(), cluster.peers.left
        # Whoever has left has told its digest before, over the same link; a silent node might never tell it.
        there = [m for m in cluster.members if m.node not in away and (m.node, m.incarnation) not in left]
        return [m.id for m in there if cluster.is_alive(m.id) and m.id not in self._by_member]
