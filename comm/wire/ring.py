"""The order of members, which of two dials, and the ring of neighbours whose links always stand. Plain values.

What all have to know (losses, newer views) goes along the ring in both directions. The lost are passed over, so that
the ring closes again; it is torn only where neighbours are stopped, and then into no more pieces than there are of
these.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence

from elastrain.comm.wire.values import PeerLost


def in_order(member: str) -> tuple[int, str]:
    """The key of the order of members: ids rise, shorter ones are older."""
    return len(member), member


def dials(one: str, other: str) -> bool:
    """Whether `one` opens the link between the two: the later member comes to the earlier one."""
    return in_order(one) > in_order(other)


def neighbours(me: str, order: Sequence[str], lost: Collection[str], nodes: Mapping[str, str]) -> frozenset[str]:
    """The nearest member that is not lost, on both sides; none where I am not in the order, or alone.

    Where another node has lost a member next to me, all of that node may be gone: then everybody on it up to the next
    node counts as well, so that they are tried at once and not one after the other.
    """
    if me not in order:
        return frozenset()
    at = order.index(me)
    forward = [*order[at + 1 :], *order[:at]]
    return frozenset({*_along(forward, lost, nodes, nodes[me]), *_along(forward[::-1], lost, nodes, nodes[me])})


def _along(way: Sequence[str], lost: Collection[str], nodes: Mapping[str, str], home: str) -> list[str]:
    found: list[str] = []
    troubled: set[str] = set()
    for member in way:
        node = nodes[member]
        if member in lost:
            troubled.add(node)
            continue
        found.append(member)
        if node == home or node not in troubled:
            break
    return found


class Ring:
    """The ring as one member knows it. `untold`: losses that the neighbours have not been told of."""

    def __init__(self) -> None:
        self.order: tuple[str, ...] = ()  # empty: this view has no ring
        self.neighbours: frozenset[str] = frozenset()
        self.untold: collections.deque[PeerLost] = collections.deque()

    def form(self, members: Collection[str]) -> None:
        self.order = tuple(sorted(members, key=in_order))

    def shrink(self, gone: Collection[str]) -> None:
        self.order = tuple([member for member in self.order if member not in gone])

    def dissolve(self) -> None:
        self.order = ()

    def close(self, me: str, lost: Collection[str], nodes: Mapping[str, str]) -> list[str]:
        """Pass over the lost; returns the members that became neighbours by that, in order."""
        before, self.neighbours = self.neighbours, neighbours(me, self.order, lost, nodes)
        return [member for member in self.order if member in self.neighbours - before]
