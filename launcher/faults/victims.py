"""The members that a fault may kill or isolate, and until when they are at risk. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from elastrain.launcher.faults.fault import Fault, Scheme
from elastrain.launcher.faults.table import CLASSES, lasts_s

HEARD_AGAIN_S = 10.0
"""Seconds after the end of a fault during which its members may still be declared lost."""


def victims(fault: Fault, nodes: Mapping[str, str]) -> set[str]:
    """Return the members that the fault may cost.

    `nodes` maps each member to its node. The fault's targets must not be random.
    """
    if not CLASSES[fault.kind].loses:
        return set()
    named = {target.name for target in fault.targets if target.scheme is Scheme.MEMBER}
    struck = {node for target in fault.targets for node in target.nodes}
    return named | {member for member, node in nodes.items() if node in struck}


class MaybeLost:
    """The members that were struck and are at risk, until they are lost or the fault is over."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def note(self, fault: Fault, nodes: Mapping[str, str], now: float) -> None:
        """Record that the fault strikes now."""
        for_s = 0.0 if CLASSES[fault.kind].heals else lasts_s(fault)
        until_s = math.inf if for_s is None else now + for_s + HEARD_AGAIN_S
        self._until_s |= {m: max(until_s, self._until_s.get(m, until_s)) for m in victims(fault, nodes)}

    def members(self, living: Collection[str], now: float) -> tuple[str, ...]:
        """Return the living members that are still at risk."""
        self._until_s = {m: s for m, s in self._until_s.items() if s > now and m in living}
        return tuple(self._until_s)
