"""Nodes that neither have a lease nor answer this one: others may reach them. They are asked, and answer, in the nodes'
own keys (`NodeRecord.asks`, `reaches`, `misses`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from elastrain.launcher.core.peers import Peers
from elastrain.launcher.values import NodeRecord


class Testimony(Enum):
    """What the nodes with leases say of one that has none and does not answer this one."""

    REACHED = auto()
    """It answers one of them: it lives, and has only lost the store."""
    MISSED = auto()
    """It answers none of them."""
    OPEN = auto()
    """Not all have said so yet."""


@dataclass(frozen=True, kw_only=True)
class DoubtedNode:
    """`signature`: of the start of the node. `why`: what would make it count as dead, were it asked alone."""

    signature: str
    why: str


class Vouching:
    """Owns which nodes are doubted: they would be taken for dead if others did not still have a word to say."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._open: dict[str, DoubtedNode] = {}

    @property
    def nodes(self) -> set[str]:
        return set(self._open)

    def add(self, node: str, signature: str, why: str) -> Testimony:
        """Doubt a silent node, from the first reason on. Returns what others have said of it."""
        self._open.setdefault(node, DoubtedNode(signature=signature, why=why))
        return self.word_on(node)

    def word_on(self, node: str) -> Testimony:
        """What others say of a node that is doubted."""
        signature = self._open[node].signature
        others = [peer.record for name, peer in self._peers.nodes.items() if peer.leased and name != node]
        if any(signature in record.reaches for record in others):
            return Testimony.REACHED
        return (
            Testimony.MISSED
            if all(signature in (*record.misses, *record.asks) for record in others)
            else Testimony.OPEN
        )

    def take(self, node: str) -> str:
        """Doubt it no more. Returns why it was doubted."""
        return self._open.pop(node).why

    def take_missed(self) -> dict[str, str]:
        """The nodes that nobody reaches, and why each was doubted. Who has answered meanwhile is doubted no more."""
        nodes = self._peers.nodes
        for node in [node for node in self._open if node in nodes and not nodes[node].is_silent]:
            self.take(node)
        return {node: self.take(node) for node in list(self._open) if self.word_on(node) is Testimony.MISSED}

    def record(self) -> NodeRecord:
        """This node's record, with what it asks the others now, and what it answers them."""
        asks = {doubt.signature for doubt in self._open.values()}
        peers = self._peers.nodes.values()
        asked = {name for peer in peers for name in peer.record.asks} - asks - {self._peers.record.signature}
        linked = {peer.record.signature for peer in peers if peer.linked}
        return replace(
            self._peers.record,
            asks=tuple(sorted(asks)),
            reaches=tuple(sorted(asked & linked)),
            misses=tuple(sorted(asked - linked)),
        )
