"""The other nodes as this agent sees them, this node's own record, and which members elsewhere are proven dead."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from elastrain.launcher.values import NodeRecord


class Word(Enum):
    """What the nodes with leases say of one that has none and does not answer this one."""

    REACHED = auto()
    """It answers one of them: it lives, and has only lost the store."""
    MISSED = auto()
    """It answers none of them."""
    OPEN = auto()
    """Not all have said so yet."""


@dataclass(kw_only=True)
class PeerNode:
    """Another node, as this agent sees it."""

    record: NodeRecord
    linked: bool = False
    """Its agent answers."""
    met: bool = False
    """It has answered at least once."""
    leaving: bool = False
    """It goes at the end of the step that its members are in."""
    suspected: bool = False
    """It has not answered for long enough: its members may be removed by a majority."""
    lost_touch: bool = False
    """It may have taken this node for dead since it last said which view stands."""
    leased: bool = True
    """Its lease is alive, as far as the store says."""
    doubted: str = ""
    """Why it would be taken for dead, if others did not still have a word to say; empty where that is not asked."""

    @property
    def is_silent(self) -> bool:
        """It neither has a lease nor answers."""
        return not (self.leased or self.linked)


class Peers:
    """Owns the other nodes; `record` is what this node says of itself."""

    def __init__(self, record: NodeRecord) -> None:
        self.record = record
        self.nodes: dict[str, PeerNode] = {}
        self.left: set[tuple[str, int]] = set()
        """Nodes (name, incarnation) that have gone in good order."""
        self.dead_members: set[str] = set()
        """Members of other nodes that are proven dead."""

    def present(self) -> list[NodeRecord]:
        """The nodes that are there, this one too, in the order in which they came."""
        # A node whose lease has ended may be slow, but no job should begin with it.
        present = [self.record, *(peer.record for peer in self.nodes.values() if peer.leased)]
        return sorted(present, key=lambda record: record.incarnation)

    def known(self) -> list[NodeRecord]:
        """The nodes not known to be dead, this one too, whatever their leases."""
        return [self.record, *(peer.record for peer in self.nodes.values())]

    def in_doubt(self) -> list[PeerNode]:
        """Nodes that were met, and neither have a lease nor answer."""
        return [peer for peer in self.nodes.values() if peer.met and peer.is_silent]

    def word_on(self, peer: PeerNode) -> Word:
        """What others say of this silent node."""
        name = peer.record.signature
        others = [other.record for other in self.nodes.values() if other.leased and other is not peer]
        if any(name in record.reaches for record in others):
            return Word.REACHED
        return Word.MISSED if all(name in (*record.misses, *record.asks) for record in others) else Word.OPEN

    def with_words(self) -> NodeRecord:
        """This node's record, with what it asks the others now, and what it answers them."""
        asks = {peer.record.signature for peer in self.nodes.values() if peer.doubted and peer.is_silent}
        asked = {name for peer in self.nodes.values() for name in peer.record.asks} - asks - {self.record.signature}
        linked = {peer.record.signature for peer in self.nodes.values() if peer.linked}
        reaches, misses = asked & linked, asked - linked
        return replace(
            self.record, asks=tuple(sorted(asks)), reaches=tuple(sorted(reaches)), misses=tuple(sorted(misses))
        )

    def answering(self) -> set[tuple[str, int]]:
        """The nodes (name, incarnation) whose agents answer."""
        return {(p.record.name, p.record.incarnation) for p in self.nodes.values() if p.linked}

    def leave(self, name: str) -> None:
        """Note that a node has gone in good order: nothing is lost with it."""
        if name in self.nodes:
            self.left.add((name, self.nodes[name].record.incarnation))
