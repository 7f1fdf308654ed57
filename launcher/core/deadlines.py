"""The deadlines of an agent: one class per purpose, so that no deadline can be confused with another.

Times are monotonic seconds, given by the caller. The part that handles a deadline decides what follows when it has
passed; it drops the deadline when its worker has died.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from msgspec import Struct


class RendezvousDue(Struct, frozen=True):
    """End of the wait for the least number of nodes."""


class SettleDue(Struct, frozen=True):
    """End of the wait for nodes that may put lost data into the store again."""


class LastCallDue(Struct, frozen=True):
    """End of the wait for more nodes than the least number."""


class JoinDue(Struct, frozen=True):
    """End of the wait for the last of the first workers to be ready."""


class SilenceDue(Struct, frozen=True):
    """Time at which all nodes that do not answer become suspected."""


class SuspicionDue(Struct, frozen=True):
    """Time at which suspicions are judged. A suspected member that is still alive has lost its links, not its life."""


class AskStoreDue(Struct, frozen=True):
    """Time of the next request to a store that did not answer."""


class ParkedDue(Struct, frozen=True):
    """Time at which this node ends if a change of the view still waits."""


class SparedDue(Struct, frozen=True):
    """End of a node's last report that its members hang but hold the only copy of some state.

    The node repeats the report.
    """

    node: str


class DigestsDue(Struct, frozen=True):
    """End of the wait for the digests of the other members."""


class MeetDue(Struct, frozen=True):
    """End of the wait for an answer of a node without a key."""

    node: str


class HelloDue(Struct, frozen=True):
    """End of the wait for the hello of a worker that was started later."""

    member: str


class WarmUpDue(Struct, frozen=True):
    """Time at which a joining worker gets full priority, ready or not."""

    member: str


class RestartDue(Struct, frozen=True):
    """Time after which the restart that replaced this member no longer counts."""

    member: str


class LeaveDue(Struct, frozen=True):
    """End of the wait for a worker to exit by itself."""

    member: str


class FaultDue(Struct, frozen=True):
    """Time at which a timed fault strikes."""

    number: int


class TogetherDue(Struct, frozen=True):
    """End of the wait for other nodes to say that they, too, were told to leave."""


class HandOverDue(Struct, frozen=True):
    """End of the wait of a leaving node for its members: for the end of their step, or for the last checkpoint."""


class HangDue(Struct, frozen=True):
    """Time by which the stacks have been taken. A member that still hangs is then killed."""

    member: str


class KilledDue(Struct, frozen=True):
    """Time by which a killed process must be gone."""

    member: str


Due: TypeAlias = (
    RendezvousDue
    | SettleDue
    | LastCallDue
    | JoinDue
    | SilenceDue
    | SuspicionDue
    | AskStoreDue
    | ParkedDue
    | SparedDue
    | DigestsDue
    | MeetDue
    | HelloDue
    | WarmUpDue
    | RestartDue
    | LeaveDue
    | FaultDue
    | TogetherDue
    | HandOverDue
    | HangDue
    | KilledDue
)


class Deadlines:
    """A table of deadlines: at most one time per `Due`."""

    def __init__(self) -> None:
        self._at_s: dict[Due, float] = {}

    def __contains__(self, due: Due) -> bool:
        return due in self._at_s

    def set(self, due: Due, at_s: float) -> None:
        """Set the time of this `Due`, and replace an earlier one."""
        self._at_s[due] = at_s

    def set_first(self, due: Due, at_s: float) -> None:
        """Set the time unless one is set already, so that repeated events cannot postpone the deadline."""
        self._at_s.setdefault(due, at_s)

    def drop(self, *dues: Due) -> None:
        """Remove these deadlines."""
        for due in dues:
            self._at_s.pop(due, None)

    def clear(self) -> None:
        """Remove all deadlines."""
        self._at_s.clear()

    def next_s(self) -> float | None:
        """Return the earliest deadline, or None if there is none."""
        return min(self._at_s.values(), default=None)

    def take_passed(self, now: float) -> Iterator[Due]:
        """Remove and yield the deadlines that have passed, in the order in which they were set."""
        for due in [due for due, at_s in self._at_s.items() if at_s <= now]:
            # The handling of an earlier deadline may have dropped this one.
            if self._at_s.pop(due, None) is not None:
                yield due
