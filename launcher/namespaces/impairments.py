"""What is wrong with a network for a while, and what several such things come to. Values and pure functions.

What a fault of the network comes to, in the words of `elastrain inject`: its impairments. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

from elastrain.launcher.faults.fault import Fault, Scheme, Target
from elastrain.launcher.faults.table import settings

Pair: TypeAlias = tuple[str, str]
"""(from, to): packets of the one host to the other."""
_BURST_BYTES = 1 << 16
"""As much as one packet may hold before a card cuts it: less would let none through."""
Way: TypeAlias = Literal["both", "in", "out"]
"""Which packets of a host: those that it sends, those that it gets, or both."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Packets of these pairs are dropped at random, so many in a hundred; nobody is told."""

    pairs: frozenset[Pair]
    percent: float = 100.0


@dataclass(frozen=True, kw_only=True)
class Unplugged:
    """The host's cable is out: the kernel at both ends sees that."""

    host: str


@dataclass(frozen=True, kw_only=True)
class Slow:
    """The host's cable carries so much at most, each way: what comes faster waits, and is late."""

    host: str
    bits_per_s: int


@dataclass(frozen=True, kw_only=True)
class Policed:
    """What comes faster between these pairs is dropped: cables have queues, the way between two hosts has none."""

    pairs: frozenset[Pair]
    bits_per_s: int


Impairment: TypeAlias = Loss | Unplugged | Slow | Policed


@dataclass(frozen=True, kw_only=True)
class Hearing:
    """How a host hears another one."""

    percent_lost: float = 0.0
    bits_per_s: int | None = None
    """None: as fast as the machine."""

    def worse(self, *, percent_lost: float = 0.0, bits_per_s: int | None = None) -> Hearing:
        rates = [rate for rate in (self.bits_per_s, bits_per_s) if rate is not None]
        return Hearing(percent_lost=max(self.percent_lost, percent_lost), bits_per_s=min(rates) if rates else None)


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A whole network, as it is to be."""

    hearing: Mapping[str, Mapping[str, Hearing]] = field(default_factory=dict)
    """Receiver -> sender -> how it hears that one; who is not named is heard well."""
    unplugged: frozenset[str] = frozenset()
    rates: Mapping[str, int] = field(default_factory=dict)
    """Host -> bits per second; who is not named is as fast as the machine."""


def between(hosts: Collection[str], others: Collection[str], way: Way = "both") -> frozenset[Pair]:
    """The pairs between two sides; `way` is seen from `hosts`. Nobody is apart from himself."""
    pairs = [(host, other) for host in hosts for other in others if host != other and other not in hosts]
    outward = pairs if way in ("both", "out") else []
    inward = [(other, host) for host, other in pairs] if way in ("both", "in") else []
    return frozenset([*outward, *inward])


def condition(impairments: Sequence[Impairment]) -> Condition:
    """The worst of all holds for each pair and cable, so that the end of one does not mend what another has broken."""
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
    """Source address -> how it is heard: nft's commands by which a host hears so, instead of what held before.

    All drops are made where packets arrive: the sender must not notice.
    """
    drops = "".join(_drops(source, heard) for source, heard in sorted(hearing.items()))
    # nft deletes only what is there; so that the first time is like any other, the table is made before.
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
