"""What a fault of the network comes to, in the words of `elastrain inject`: its impairments. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from elastrain.launcher.faults.fault import Fault, Scheme, Target
from elastrain.launcher.faults.table import settings
from elastrain.launcher.namespaces.impairments import Impairment, Loss, Pair, Policed, Slow, Unplugged, Way, between


def impairments(fault: Fault, nodes: Sequence[str], etcd: str) -> list[Impairment]:
    """Of all its targets together: nodes that are cut off in one fault still reach one another. `etcd`: its host."""
    asked = settings(fault)
    links = [target for target in fault.targets if target.scheme is Scheme.LINK]
    cut_off = [target.name for target in fault.targets if target.scheme is Scheme.NODE]
    way = cast(Way, asked.get("way", "both"))
    others = {"all": [*nodes, etcd], "peers": nodes, "etcd": [etcd]}[str(asked.get("only", "all"))]
    pairs = between(cut_off, others, way).union(*(between(*_ends(link), way) for link in links))
    match fault.kind:
        case "flap":
            return [*(Unplugged(host=node) for node in cut_off), *_lost(_apart_from(cut_off, pairs), 100.0)]
        case "slow-link":
            bits_per_s = round(float(asked["rate"]) * 1e6)
            policed = _apart_from(cut_off, pairs)
            slow = [Slow(host=node, bits_per_s=bits_per_s) for node in cut_off]
            return [*slow, *([Policed(pairs=policed, bits_per_s=bits_per_s)] if policed else [])]
        case "loss":
            return _lost(pairs, float(asked["percent"]))
        case _:
            return _lost(pairs, 100.0)


def _lost(pairs: frozenset[Pair], percent: float) -> list[Impairment]:
    return [Loss(pairs=pairs, percent=percent)] if pairs else []


def _apart_from(nodes: Sequence[str], pairs: frozenset[Pair]) -> frozenset[Pair]:
    """What happens to a node's cable happens to all its pairs at once."""
    return frozenset(pair for pair in pairs if not set(pair) & set(nodes))


def _ends(link: Target) -> tuple[list[str], list[str]]:
    """Of A-B: each is a side of its own."""
    one, _, other = link.name.partition("-")
    return [one], [other]
