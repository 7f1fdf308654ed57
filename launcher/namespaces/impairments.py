"""Impairments of a simulated network, and the condition that several of them cause together. Pure.

`impairments` translates a network fault of `elastrain inject`. `condition` combines impairments, and `drop_rules` turns
the result into commands for `nft`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

from elastrain.launcher.faults.fault import Fault, Scheme, Target
from elastrain.launcher.faults.table import settings

Pair: TypeAlias = tuple[str, str]
"""(sender, receiver): the packets from one host to another."""
_BURST_BYTES = 1 << 16
"""Burst of a rate limit: the largest packet before a network card splits it. A smaller burst would drop them all."""
Way: TypeAlias = Literal["both", "in", "out"]
"""The affected packets of a host: received ("in"), sent ("out"), or both."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Packets of these pairs are dropped at random, without a notice to the sender. `percent` is in 0..100."""

    pairs: frozenset[Pair]
    percent: float = 100.0


@dataclass(frozen=True, kw_only=True)
class Unplugged:
    """The host's cable is unplugged. The kernels at both ends see that."""

    host: str


@dataclass(frozen=True, kw_only=True)
class Slow:
    """The host's cable has a limited rate in each direction. Faster packets are queued, and arrive late."""

    host: str
    bits_per_s: int


@dataclass(frozen=True, kw_only=True)
class Policed:
    """Packets between these pairs beyond a rate are dropped.

    They cannot be queued, because only cables have queues.
    """

    pairs: frozenset[Pair]
    bits_per_s: int


Impairment: TypeAlias = Loss | Unplugged | Slow | Policed


@dataclass(frozen=True, kw_only=True)
class Hearing:
    """The quality of the path from one host to another."""

    percent_lost: float = 0.0
    bits_per_s: int | None = None
    """Rate limit; None for no limit."""

    def worse(self, *, percent_lost: float = 0.0, bits_per_s: int | None = None) -> Hearing:
        """Return this quality, made worse by a further loss or rate limit."""
        rates = [rate for rate in (self.bits_per_s, bits_per_s) if rate is not None]
        return Hearing(percent_lost=max(self.percent_lost, percent_lost), bits_per_s=min(rates) if rates else None)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """The wanted condition of the whole network."""

    hearing: Mapping[str, Mapping[str, Hearing]] = field(default_factory=dict)
    """Receiver -> sender -> quality of the path. Missing pairs have no impairment."""
    unplugged: frozenset[str] = frozenset()
    rates: Mapping[str, int] = field(default_factory=dict)
    """Host -> bits per second of its cable. Missing hosts have no limit."""


def between(hosts: Collection[str], others: Collection[str], way: Way = "both") -> frozenset[Pair]:
    """Return the pairs between two groups of hosts. `way` is seen from `hosts`. A host is never paired with itself."""
    pairs = [(host, other) for host in hosts for other in others if host != other and other not in hosts]
    outward = pairs if way in ("both", "out") else []
    inward = [(other, host) for host, other in pairs] if way in ("both", "in") else []
    return frozenset([*outward, *inward])


def condition(impairments: Sequence[Impairment]) -> Condition:
    """Return the combined condition. The worst impairment counts for each pair and cable.

    Therefore the end of one impairment does not undo another one.
    """
    hearing: dict[str, dict[str, Hearing]] = {}
    rates: dict[str, int] = {}
    for one in impairments:
        if isinstance(one, Loss | Policed):
            percent = one.percent if isinstance(one, Loss) else 0.0
            rate = one.bits_per_s if isinstance(one, Policed) else None
            for sender, receiver in one.pairs:
                known = hearing.setdefault(receiver, {})
                known[sender] = known.get(sender, Hearing()).worse(percent_lost=percent, bits_per_s=rate)
        elif isinstance(one, Slow):
            rates[one.host] = min(rates.get(one.host, one.bits_per_s), one.bits_per_s)
    unplugged = frozenset(one.host for one in impairments if isinstance(one, Unplugged))
    return Condition(hearing=hearing, unplugged=unplugged, rates=rates)


def drop_rules(hearing: Mapping[str, Hearing]) -> str:
    """Return nft commands that replace all earlier rules of a receiving host.

    `hearing` maps source addresses to the quality of their paths. Packets are dropped by the receiver, so that the
    sender does not notice.
    """
    drops = "".join(_drops(source, heard) for source, heard in sorted(hearing.items()))
    # nft fails to delete a missing table, so it is created first.
    return (
        "table inet elastrain {}\ndelete table inet elastrain\n"
        f"table inet elastrain {{\nchain input {{\ntype filter hook input priority 0; policy accept;\n{drops}}}\n}}\n"
    )


def _drops(source: str, heard: Hearing) -> str:
    rules = []
    if heard.percent_lost >= 100.0:
        rules.append("drop")
    elif heard.percent_lost:
        rules.append(f"numgen random mod 10000 < {round(heard.percent_lost * 100)} drop")
    if heard.bits_per_s is not None:
        rules.append(f"limit rate over {max(heard.bits_per_s // 8, 1)} bytes/second burst {_BURST_BYTES} bytes drop")
    return "".join(f"ip saddr {source} {rule}\n" for rule in rules)


def impairments(fault: Fault, nodes: Sequence[str], etcd: str) -> list[Impairment]:
    """Return the impairments of a fault, for all its targets together.

    Nodes that one fault cuts off still reach each other. `etcd` is the host on which etcd runs.
    """
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
    """Return the pairs without those of `nodes`. An impairment of a node's cable already covers these."""
    return frozenset(pair for pair in pairs if not set(pair) & set(nodes))


def _ends(link: Target) -> tuple[list[str], list[str]]:
    """Return the two ends of a link, each as a group of one host."""
    one, _, other = link.name.partition("-")
    return [one], [other]
