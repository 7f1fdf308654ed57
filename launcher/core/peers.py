"""The other nodes as this agent sees them, this node's own record, and which members elsewhere are proven dead."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from elastrain.launcher.values import NodeRecord


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
    times_up: int = 0
    """How often its agent has begun to answer."""
    tells_view: bool = False
    """Since it was linked it has said which view stands: that is in the store, or it puts it there again."""
    leased: bool = True
    """Its lease is alive, as far as the store says."""

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
        self._presumed_s: dict[str, float] = {}
        """Of these, whose death was concluded from the silence of their node and its missing key; and since when."""

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

    def take_for_dead(self, members: Collection[str], *, presumed_s: float | None = None) -> None:
        """`presumed_s`: since when they were missed, where that is all that is known of their deaths."""
        self.dead_members.update(members)
        for member in members:
            self._presumed_s.pop(member, None)
            if presumed_s is not None:
                self._presumed_s[member] = presumed_s

    def presumed_since_s(self, members: Collection[str]) -> float | None:
        """Since when the last of these is missed whose deaths were concluded from silence; None without any."""
        return max((at_s for member, at_s in self._presumed_s.items() if member in members), default=None)

    def back_to_life(self, members: Collection[str]) -> None:
        for member in members:
            self.dead_members.discard(member)
            self._presumed_s.pop(member, None)

    def open_again(self, members: Collection[str]) -> None:
        """Let these members' deaths be concluded anew, where they were concluded from silence.

        Another agent has put them into a view since: whoever that was lived, and may be the one of any of them.
        """
        self.back_to_life(self._presumed_s.keys() & set(members))

    def answering(self) -> set[tuple[str, int]]:
        """The nodes (name, incarnation) whose agents answer."""
        return {(p.record.name, p.record.incarnation) for p in self.nodes.values() if p.linked}

    def leave(self, name: str) -> None:
        """Note that a node has gone in good order: nothing is lost with it."""
        if name in self.nodes:
            self.left.add((name, self.nodes[name].record.incarnation))
