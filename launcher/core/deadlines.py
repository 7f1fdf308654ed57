"""What is due when: a kind per purpose, so that no deadline can be taken for another.

Times are monotonic seconds, given by the caller. What follows when one has passed is decided by the part that set it;
`machine` knows which.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from msgspec import Struct


class RendezvousDue(Struct, frozen=True):
    """The least number of nodes should have come."""


class SettleDue(Struct, frozen=True):
    """Nodes that know of the job should have put again what the store has lost."""


class LastCallDue(Struct, frozen=True):
    """More nodes than the least are waited for no longer."""


class JoinDue(Struct, frozen=True):
    """The last of the first workers should be ready."""


class SilenceDue(Struct, frozen=True):
    """Nodes that do not answer by now are suspected."""


class SuspicionDue(Struct, frozen=True):
    """A suspected member that still lives has lost its links, not its life."""


class AskStoreDue(Struct, frozen=True):
    """A store that did not answer is asked again."""


class ParkedDue(Struct, frozen=True):
    """A change of the view has waited for too long."""


class SparedDue(Struct, frozen=True):
    """A node should have said again that members of its stand still and alone hold some state."""

    node: str


class DigestsDue(Struct, frozen=True):
    """The digests of the other members should have come."""


class MeetDue(Struct, frozen=True):
    """A node without a key should have answered."""

    node: str


class HelloDue(Struct, frozen=True):
    """A worker that came later should have said hello."""

    member: str


class WarmUpDue(Struct, frozen=True):
    """A joiner gets full priority, ready or not."""

    member: str


class RestartDue(Struct, frozen=True):
    """The restart of the member that was replaced no longer counts."""

    member: str


class LeaveDue(Struct, frozen=True):
    """A worker should have ended by itself."""

    member: str


class FaultDue(Struct, frozen=True):
    """A fault on request has come to its time."""

    number: int


class TogetherDue(Struct, frozen=True):
    """Other nodes that were told to go at the same time have said so by now."""


class HandOverDue(Struct, frozen=True):
    """The members of a node that leaves should have come to the end of their step, or written the last checkpoint."""


class HangDue(Struct, frozen=True):
    """The stacks have been taken: a member that still hangs is ended."""

    member: str


class KilledDue(Struct, frozen=True):
    """A process that was killed should be gone."""

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
    """The times at which things are due: at most one per `Due`."""

    def __init__(self) -> None:
        self._at_s: dict[Due, float] = {}

    def __contains__(self, due: Due) -> bool:
        return due in self._at_s

    def set(self, due: Due, at_s: float) -> None:
        """Set the time of this `Due`, in the place of an earlier one."""
        self._at_s[due] = at_s

    def set_first(self, due: Due, at_s: float) -> None:
        """Set the time unless there is one already: what repeats itself must not put its own end off."""
        self._at_s.setdefault(due, at_s)

    def drop(self, *dues: Due) -> None:
        for due in dues:
            self._at_s.pop(due, None)

    def clear(self) -> None:
        self._at_s.clear()

    def next_s(self) -> float | None:
        return min(self._at_s.values(), default=None)

    def take_passed(self, now: float) -> Iterator[Due]:
        """Take those that have passed, in the order in which they were set."""
        for due in [due for due, at_s in self._at_s.items() if at_s <= now]:
            # What followed from an earlier one may have dropped it.
            if self._at_s.pop(due, None) is not None:
                yield due
