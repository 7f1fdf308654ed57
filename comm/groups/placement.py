"""On which host each member of the view is, and which groups therefore read each other's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastrain.comm.shm.alarm import waits_available
from elastrain.comm.wire.values import Peer


class Placement:
    """All members come to the same answers: it is decided from the view and from what all hosts have alike."""

    def __init__(self, me: str, node: str, *, one_host: bool) -> None:
        """`one_host`: members reach each other by shared memory whatever their nodes are called."""
        self._one_host = one_host
        self._waits, _reason = waits_available()
        self._nodes = {me: node}
        self._numbers: dict[str, int] = {}  # of the members' hosts; none where all are on one

    def renew(self, peers: Sequence[Peer]) -> None:
        self._nodes = {peer.id: peer.node for peer in peers}
        self._numbers = {} if self._one_host else _numbers(self._nodes)

    def in_memory(self, members: Sequence[str]) -> bool:
        """Whether these members are all on this host, and can wait on each other's memory."""
        nodes = set(map(self._nodes.get, members))
        return self._waits and (len(nodes) == 1 or self._one_host)

    def host_of(self, member: str) -> int:
        """A number that all members of this member's host have, and no others."""
        return self._numbers.get(member, 0)


def _numbers(nodes: Mapping[str, str]) -> dict[str, int]:
    """The number of each member's node; none where there is one node only."""
    names = set(nodes.values())
    numbers = {node: number for number, node in enumerate(sorted(names))} if len(names) > 1 else {}
    return {member: numbers[node] for member, node in nodes.items()} if numbers else {}
