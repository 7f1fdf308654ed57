"""Whether a job would keep its state if a fault struck: for those who strike at random and want it to go on."""

from __future__ import annotations

from collections.abc import Collection

from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.faults.fault import Fault
from elastrain.launcher.faults.table import CLASSES, Carrier
from elastrain.launcher.faults.victims import victims


def would_cost_state(fault: Fault, cluster: Cluster, doubtful: Collection[str]) -> str:
    """Why the fault, whose targets have names, may cost the state; empty: it may strike.

    `doubtful`: members that may be lost already, by faults that struck before.
    """
    struck = victims(fault, {member.id: member.node for member in cluster.members})
    if not struck:
        return ""
    holders = cluster.holders
    if holders is None:
        return f"{fault} does not strike: who holds the state is not known yet"
    left = set(cluster.alive_in_view()) - struck - set(doubtful)
    bare = [shard for shard, held in holders.items() if not left & set(held)]
    if bare or not left:
        what = f"all holders of shard {bare[0]}" if bare else "all members"
        return f"{fault} does not strike: {what} would be struck"
    # The side that is cut off must be the smaller one, or the job parks.
    if CLASSES[fault.kind].by is Carrier.LAUNCHER and 2 * len(left) <= len(cluster.ids):
        return f"{fault} does not strike: no majority would be left"
    return ""
