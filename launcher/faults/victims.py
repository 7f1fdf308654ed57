"""Whom a fault may cost, and until when that is open. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from elastrain.launcher.faults.fault import Fault, Scheme
from elastrain.launcher.faults.table import CLASSES, lasts_s

HEARD_AGAIN_S = 10.0
"""After a fault that has ended, its members may still be taken for lost."""


def victims(fault: Fault, nodes: Mapping[str, str]) -> set[str]:
    """Members whom the fault, whose targets have names, may cost. `nodes`: member -> where it is."""
    if not CLASSES[fault.kind].loses:
        return set()
    named = {target.name for target in fault.targets if target.scheme is Scheme.MEMBER}
    struck = {node for target in fault.targets for node in target.nodes}
    return named | {member for member, node in nodes.items() if node in struck}


class MaybeLost:
    """Owns who was struck and may be lost, until he is, or until the fault has ended."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def note(self, fault: Fault, nodes: Mapping[str, str], now: float) -> None:
        """It strikes."""
        for_s = 0.0 if CLASSES[fault.kind].heals else lasts_s(fault)
        until_s = math.inf if for_s is None else now + for_s + HEARD_AGAIN_S
        self._until_s |= {m: max(until_s, self._until_s.get(m, until_s)) for m in victims(fault, nodes)}

    def members(self, living: Collection[str], now: float) -> tuple[str, ...]:
        """Those of the living who may still be lost."""
        self._until_s = {m: s for m, s in self._until_s.items() if s > now and m in living}
        return tuple(self._until_s)
