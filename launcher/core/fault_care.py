"""Whether a job would keep its state if a fault struck: for those who strike at random and want it to go on."""

from __future__ import annotations

import math

from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.faults.fault import Fault, Scheme
from elastrain.launcher.faults.table import CLASSES, Carrier, lasts_s

_HEARD_AGAIN_S = 10.0
"""After a fault that has ended, its members may still be taken for lost."""


class FaultCare:
    """Owns who was struck with care and may be lost, until he is or until the fault has ended."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._struck_until_s: dict[str, float] = {}

    def problem(self, fault: Fault, now: float) -> str:
        """Why the fault, whose targets have names, may cost the state; empty: it may strike."""
        victims = self._victims(fault)
        if not victims:
            return ""
        holders = self._cluster.holders
        if holders is None:
            return f"{fault} does not strike: who holds the state is not known yet"
        alive = set(self._cluster.alive_in_view())
        left = alive - victims - self._struck(now)
        bare = [shard for shard, held in holders.items() if not left & set(held)]
        if bare or not left:
            what = f"all holders of shard {bare[0]}" if bare else "all members"
            return f"{fault} does not strike: {what} would be struck"
        # The side that is cut off must be the smaller one, or the job parks.
        if CLASSES[fault.kind].by is Carrier.LAUNCHER and 2 * len(left) <= len(self._cluster.ids):
            return f"{fault} does not strike: no majority would be left"
        return ""

    def note(self, fault: Fault, now: float) -> None:
        """It strikes."""
        for_s = lasts_s(fault)
        until_s = math.inf if for_s is None else now + for_s + _HEARD_AGAIN_S
        self._struck_until_s.update(dict.fromkeys(self._victims(fault), until_s))

    def _struck(self, now: float) -> set[str]:
        """Those who may still be lost. Who is gone counts no more: he is nobody's holder."""
        alive = self._cluster.alive_in_view()
        self._struck_until_s = {m: s for m, s in self._struck_until_s.items() if s > now and m in alive}
        return set(self._struck_until_s)

    def _victims(self, fault: Fault) -> set[str]:
        """Members of the view whom the fault may cost."""
        if not CLASSES[fault.kind].loses:
            return set()
        names = {target.name for target in fault.targets if target.scheme is Scheme.MEMBER}
        nodes = {node for target in fault.targets for node in target.nodes}
        return names | {member.id for member in self._cluster.members if member.node in nodes}
