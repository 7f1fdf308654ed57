"""When a member whose node is told to go may end: no work is lost with it, and no state. Pure."""

from __future__ import annotations

from collections.abc import Mapping

Elsewhere = Mapping[int, frozenset[str]]
"""Each shard that this member holds -> its holders on other nodes."""


class Departure:
    """Owns whether the node is to go, and who held what elsewhere at the last commit."""

    def __init__(self) -> None:
        self._is_asked = False
        self._before: Elsewhere | None = None

    def ask(self) -> None:
        """The node is told to go."""
        self._is_asked = True

    def may_go(self, elsewhere: Elsewhere | None) -> bool:
        """After each commit: each shard has a holder elsewhere that was one at the last commit, too, and so knows it.

        elsewhere: None while views change, when nobody knows who lives.
        """
        before, self._before = self._before, elsewhere
        if not self._is_asked or before is None or elsewhere is None:
            return False
        return all(holders & before.get(shard, frozenset()) for shard, holders in elsewhere.items())
