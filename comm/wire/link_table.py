"""The links of a view by member, losses reported by others, the queue of events, and proofs of death.

`judge` decides which cause of a loss counts. `Proofs` looks for proof that a lost peer on this host has ended: once no
process listens at its UNIX socket, its mesh is closed. A living peer only accepts a connection that ends at once.
"""

from __future__ import annotations

import collections
import errno
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from elastrain.comm.shm.device_segments import DeviceShare
from elastrain.comm.shm.imports import Imports
from elastrain.comm.wire.addresses import Event, Frame, LossCause, Newer, Peer
from elastrain.comm.wire.link import Link
from elastrain.comm.wire.ports import choose_address, connect


class LinkTable:
    """`by_member`: one link for each other member of the view. `generation`: the view's; 0 before the first one."""

    def __init__(self, me: str, node: str) -> None:
        self.me, self.node = me, node
        self.generation = 0
        self.by_member: dict[str, Link] = {}
        self.share: DeviceShare | None = None
        """Device memory that members of this host read, from the next link on."""

    def __iter__(self) -> Iterator[Link]:
        """All links as they are now: they may be lost or removed while a caller goes through them."""
        return iter(list(self.by_member.values()))

    def reads_device(self, member: str) -> bool:
        """Return True if tensors of the device memory that this process shares can be sent to the member."""
        link = self.get(member)
        return self.share is not None if member == self.me else link is not None and link.reads_device

    def all_read_device(self) -> bool:
        """Return True if that holds for all members of the view. Any thread may ask."""
        return self.share is not None and all(link.reads_device for link in self)

    def get(self, member: str) -> Link | None:
        """Return the link to a member, or None."""
        return self.by_member.get(member)

    @property
    def members(self) -> tuple[str, ...]:
        """All members of the view, lost ones and this one included, sorted."""
        return tuple(sorted([self.me, *self.by_member]))

    @property
    def standing(self) -> list[Link]:
        """Links that are opened and not lost. Broadcasts use them."""
        return [link for link in self if link.opening.begun and link.lost is None]

    @property
    def complete(self) -> bool:
        """True if all members that are not lost have a stream."""
        return all(link.stream is not None or link.lost is not None for link in self)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait to be sent to members that are not lost."""
        waiting = [link for link in self if link.lost is None and (link.opening.used or link.stream is not None)]
        return sum(link.outbox.size_bytes for link in waiting)

    def busy(self) -> frozenset[str]:
        """Return the members to which so much still waits to be sent that what is queued now has to wait behind it."""
        return frozenset(member for member, link in self.by_member.items() if link.lost is None and _has_backlog(link))

    def take_rates(self) -> dict[str, float]:
        """Return member -> bytes per second with which its large frames came in since the last call."""
        timed = {link.peer.id: link.stream.take_timed() for link in self if link.stream is not None}
        return {member: size_bytes / seconds for member, (size_bytes, seconds) in timed.items() if seconds}

    def copy_unsent(self) -> None:
        """Copy what waits in streams: the tensors behind it may change from now on. For ends before their time."""
        for link in self:
            link.outbox.copy()

    def is_ahead(self, member: str) -> bool:
        """Return True if this member is known to be in a newer generation, so it sends nothing more in this one."""
        link = self.get(member)
        return link is not None and link.heard.newest > self.generation

    def may_be_torn(self) -> bool:
        """Return True if memory of other members may have changed while it was read.

        A member reuses memory that it lent to members which a newer view leaves out, and a stopped process has not
        heard of that view. While all members are in this view, everything copied before the call is intact.
        """
        return any(link.has_gone_on(self.generation) for link in self)

    def imports(self) -> dict[str, Imports]:
        """Return the memory of each other member on this host. It outlives the link."""
        return {member: link.imports for member, link in self.by_member.items() if link.same_host}


_BACKLOG_BYTES = 512 << 10
"""Bytes in the kernel from which on a link is busy. A link of 1 Gbit/s needs 4 ms for them."""


def _has_backlog(link: Link) -> bool:
    return bool(link.outbox) or (link.stream is not None and link.stream.unsent_bytes > _BACKLOG_BYTES)


REPORTS_MAX = 4096

# What is learnt later replaces only what says less: a proof is never taken back by a guess of another member.
_CERTAINTY = {
    LossCause.UNREACHED: 0,
    LossCause.BROKEN: 1,
    LossCause.LEFT_US_OUT: 2,
    LossCause.LEFT: 2,
    LossCause.DEAD: 2,
}
# What is told of a loss that this member did not see itself. LEFT_US_OUT is missing: it is a matter between two.
DESCRIPTIONS = {
    LossCause.UNREACHED: "it could not be reached",
    LossCause.BROKEN: "its connection to another member broke",
    LossCause.LEFT: "it left",
    LossCause.DEAD: "its process ended",
}


def says_more(one: LossCause, other: LossCause) -> bool:
    """Return True if `one` is surer knowledge than `other`."""
    return _CERTAINTY[one] > _CERTAINTY[other]


def judge(
    cause: LossCause, reason: str, *, left_out: int | None, ended: bool, reported: LossCause | None
) -> tuple[LossCause, str]:
    """Return the cause and reason to report for a link that ended here with `cause` and `reason`.

    `left_out`: the last word of the peer (0: it leaves; else the generation without us), which counts most. `ended`:
    its process is proven dead. `reported`: the cause that other members report.
    """
    if left_out:
        return LossCause.LEFT_US_OUT, f"it went on without us in generation {left_out}"
    if left_out is not None:
        return LossCause.LEFT, DESCRIPTIONS[LossCause.LEFT]
    if ended:
        return LossCause.DEAD, DESCRIPTIONS[LossCause.DEAD]
    if reported is not None and says_more(reported, cause):
        return reported, DESCRIPTIONS[reported]
    return cause, reason


@dataclass(kw_only=True)
class Reports:
    """Losses reported for members that no view names yet. They count once a view names the member."""

    _by_member: dict[str, tuple[LossCause, int]] = field(default_factory=dict)  # with the generation of the report

    def note(self, member: str, cause: LossCause, generation: int) -> None:
        """Keep a report, up to `REPORTS_MAX` members."""
        # A limit, because any id may be reported: a member that is left out is noticed later, by its silence.
        if len(self._by_member) < REPORTS_MAX:
            self._by_member[member] = (cause, generation)

    def take(self, member: str) -> tuple[LossCause, int] | None:
        """Return and forget the report on a member, or None."""
        return self._by_member.pop(member, None)

    def forget_until(self, generation: int) -> None:
        """Drop what was reported up to this generation: its view would name the member if it were still expected."""
        self._by_member = {member: told for member, told in self._by_member.items() if told[1] > generation}


class EventQueue:
    """Events that wait for the reader of a mesh, in order per member.

    `holds_newer`: frames of generations that are not ours yet stay with their link until an edit reaches them; else
    the reader gets them at once.
    """

    def __init__(self, *, holds_newer: bool) -> None:
        self._holds_newer = holds_newer
        self._events: collections.deque[Event] = collections.deque()
        self._newest = 0  # generation that the reader knows of

    def __bool__(self) -> bool:
        return bool(self._events)

    def put(self, event: Event) -> None:
        """Append an event."""
        self._events.append(event)

    def sort_in(self, frame: Frame, held: list[Frame], generation: int) -> None:
        """Queue a frame, hold it until its generation begins, or drop a frame of a former generation."""
        if frame.generation > generation and self._holds_newer:
            held.append(frame)
        elif frame.generation >= generation:
            self._events.append(frame)

    def deliver(self, held: list[Frame], generation: int) -> list[Frame]:
        """Tell of the held frames that are due now; returns those that stay held."""
        self._events.extend(frame for frame in held if frame.generation == generation)
        return [frame for frame in held if frame.generation > generation]

    def hear_of(self, generation: int) -> bool:
        """Tell that a newer generation exists; True the first time that it is heard of."""
        if generation <= self._newest:
            return False
        self._newest = generation
        self._events.append(Newer(generation=generation))
        return True

    def begin(self, generation: int) -> None:
        """Begin a generation: drop events of former ones. Losses that still count are put again."""
        self._newest = max(self._newest, generation)
        if not self._events:
            return
        kept = [
            event
            for event in self._events
            if (isinstance(event, Frame) and event.generation >= generation)
            or (isinstance(event, Newer) and event.generation > generation)
        ]
        self._events = collections.deque(kept)

    def take(self) -> list[Event]:
        """Return all events and forget them."""
        events = list(self._events)
        self._events.clear()
        return events


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
        """Stop the search: no view names this member, or its end is known."""
        self._searches.pop(member, None)

    def next_due_s(self) -> float:
        """Return the time.monotonic() at which `run_timers` is due; inf if never."""
        if not self._searches:  # asked before every sleep, and mostly there is no search
            return math.inf
        return min(search.due_s for search in self._searches.values())

    def run_timers(self, now_s: float) -> None:
        """Do everything that is due."""
        for member, search in [each for each in self._searches.items() if each[1].due_s <= now_s]:
            is_deserted = _is_deserted(search.address)
            search.due_s = now_s + _ASK_AGAIN_S * 2**search.asked
            search.asked += 1
            if is_deserted or search.asked == _QUESTIONS_MAX:
                self.drop(member)
            if is_deserted:
                self._found(member)


def _is_deserted(address: str) -> bool:
    try:
        sock, result = connect(address)
    except OSError:  # no descriptor is left
        return False
    sock.close()
    return result == errno.ECONNREFUSED
