"""Who is whose neighbour on the ring of members whose links always stand: plain values.

What all have to know (losses, newer views) goes along the ring in both directions. Who is lost is passed over, so that
the ring closes again; it is torn only where neighbours are stopped, and then in no more pieces than there are of these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def neighbours(me: str, order: Sequence[str], lost: Collection[str], nodes: Mapping[str, str]) -> frozenset[str]:
    """The nearest that is not lost on both sides; none where I am not in the order, or alone.

    Where another node has lost somebody next to me, all of it may be gone: then everybody on it up to the next node
    counts as well, so that they are tried at once and not one after the other.
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
