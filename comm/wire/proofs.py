"""Proofs that a lost peer of this host has ended, where its link broke before it could show its beacon.

The kernel is asked: once nobody listens at the peer's UNIX socket any more, its mesh is closed. A peer that is alive
is not disturbed: it accepts a connection that ends before a word was said.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastrain.comm.wire.addresses import choose_address, connect
from elastrain.comm.wire.values import Peer

# A process that is being killed closes its sockets one after the other: its listener may be the last of them. The
# sixth question comes 0.3 s after the first.
_ASK_AGAIN_S = 0.01
_QUESTIONS_MAX = 6


@dataclass(kw_only=True)
class _Search:
    address: str
    asked: int = 0
    due_s: float


class Proofs:
    """Searches for proof, by member. Called by the thread that polls. `found`: this member's mesh is closed."""

    def __init__(self, found: Callable[[str], None]) -> None:
        self._found = found
        self._searches: dict[str, _Search] = {}

    def seek(self, peer: Peer) -> None:
        """Ask at the next `run_timers`, and again for a while."""
        try:
            address = choose_address(peer.address, same_node=True)
        except ValueError:  # this peer was to dial us
            return
        if address.startswith("unix:"):  # anybody may listen at the port of a process that has ended
            self._searches[peer.id] = _Search(address=address, due_s=time.monotonic())

    def drop(self, member: str) -> None:
        """No view names this member any more, or its end is known."""
        self._searches.pop(member, None)

    def next_due_s(self) -> float:
        """When `run_timers` has something to do, in time.monotonic(); inf: nothing is due."""
        if not self._searches:  # asked before every sleep: mostly nobody is sought
            return math.inf
        return min(search.due_s for search in self._searches.values())

    def run_timers(self, now_s: float) -> None:
        for member, search in [each for each in self._searches.items() if each[1].due_s <= now_s]:
            nobody = _nobody_listens(search.address)
            search.due_s = now_s + _ASK_AGAIN_S * 2**search.asked
            search.asked += 1
            if nobody or search.asked == _QUESTIONS_MAX:
                self.drop(member)
            if nobody:
                self._found(member)


def _nobody_listens(address: str) -> bool:
    try:
        sock, result = connect(address)
    except OSError:  # no descriptor is left
        return False
    sock.close()
    return result == errno.ECONNREFUSED
