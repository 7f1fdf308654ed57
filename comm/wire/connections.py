"""The connections of a mesh through its views: which members have a link, which are lost, and the events of that.

Links along a *ring* (see `addresses`) always exist; what concerns all members travels along it. `opener` opens links,
`traffic` carries frames; the consequences are decided here.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from elastrain.base.event_loop import EventLoop
from elastrain.comm.shm.liveness import Beacon
from elastrain.comm.shm.segments import SharedMemory
from elastrain.comm.shm.shared_memory import Pin
from elastrain.comm.wire.addresses import (
    Credentials,
    LossCause,
    MeshConfig,
    Peer,
    PeerLost,
    Ring,
    dials,
)
from elastrain.comm.wire.link import Link
from elastrain.comm.wire.link_table import DESCRIPTIONS, EventQueue, LinkTable, Proofs, Reports, judge, says_more
from elastrain.comm.wire.opener import Opener, OpenerEvents
from elastrain.comm.wire.ports import choose_address
from elastrain.comm.wire.secure import Connection
from elastrain.comm.wire.traffic import Traffic, TrafficEvents

LinkPlan = Literal["ring", "all"]


class MeshConnections:
    """Links and losses of a mesh. Called by the polling thread. `events`: events not yet told."""

    def __init__(
        self,
        links: LinkTable,
        loop: EventLoop,
        memory: SharedMemory,
        credentials: Credentials,
        config: MeshConfig,
        beacon: Beacon | None,
    ) -> None:
        """Open the listeners. Raises what `Opener` raises."""
        self._links, self._memory, self._beacon = links, memory, beacon
        self.events = EventQueue(holds_newer=config.holds_newer)
        self.pin: Pin | None = None
        """Pins the mappings of peers' memory, from the next link on."""
        self._by_unix = config.transport == "unix"
        self._ring = Ring()
        self._reports = Reports()
        self._maintaining = False  # the ring: that may lose more members, which are dealt with in the same pass
        traffic_events = TrafficEvents(newer=self._hear_of, served=self._take_heard, broken=self.lose)
        self.traffic = Traffic(links, loop, self.events, traffic_events, config)
        opener_events = OpenerEvents(
            prepare=self._prepare, connected=self._connected, failed=self._failed, newer=self._hear_of
        )
        self.opener = Opener(links, loop, opener_events, credentials, config)
        self._proofs = Proofs(lambda member: self._hear_loss(member, LossCause.LEFT, 0))

    def edit(self, generation: int, peers: Mapping[str, Peer], plan: LinkPlan, *, renew: bool) -> None:
        """Take over a view of these other members: keep the links to members that stay, in place, or make them anew.

        Raises ValueError for an address that is none, before anything has changed.
        """
        links = self._links.by_member
        added = [peer for member, peer in peers.items() if member not in links]
        for peer in added:
            if dials(self._links.me, peer.id):
                choose_address(peer.address, same_node=peer.node == self._links.node)
        if self._beacon is not None:
            # First of all: a member that is left out must see it before memory that it may be reading is used again.
            self._beacon.tell_generation(generation)
        if renew:
            self._forget_links_between_hosts(peers)
            added = [peer for member, peer in peers.items() if member not in links]
        gone = {member: link for member, link in links.items() if member not in peers}
        shrinks = plan == "ring" and bool(self._ring.order) and not added
        self._maintaining = True  # not before the view is whole
        try:
            self._change(generation, gone, added)
        finally:
            self._maintaining = False
        if shrinks:
            self._ring.shrink(gone)
        elif plan == "ring":
            self._ring.form(self._links.members)
        else:
            self._ring.dissolve()
        for peer in added if plan == "all" else []:
            self.opener.open(links[peer.id], patient=False)
        # Around those that were lost before, the ring was closed when that became known.
        if not shrinks or self._ring.untold or [link for link in gone.values() if link.lost is None]:
            self._maintain_ring(frozenset([peer.id for peer in added]))

    def _change(self, generation: int, gone: Collection[str], added: Sequence[Peer]) -> None:
        self._links.generation = generation
        self.opener.begin(generation)
        self.traffic.begin_generation()
        for member in gone:
            self._proofs.drop(member)
            self._remove(self._links.by_member.pop(member))
        self.events.begin(generation)
        known_lost = [link.lost for link in self._links.by_member.values() if link.lost is not None]
        for peer in added:
            self._add(peer)
        self._reports.forget_until(generation)
        self.opener.forget_early(generation)
        self.traffic.deliver_held()
        for lost in known_lost:
            self._tell(lost)

    def _add(self, peer: Peer) -> None:
        same_host = self._by_unix or peer.node == self._links.node
        link = Link(peer, same_host=same_host, memory=self._memory, pin=self.pin, share=self._links.share)
        self._links.by_member[peer.id] = link
        self.opener.admit_early(link)
        reported = self._reports.take(peer.id)
        if reported is not None:
            self._hear_loss(peer.id, *reported)

    def _forget_links_between_hosts(self, peers: Collection[str]) -> None:
        """Drop links to other hosts, and broken ones, to members that stay; the other ends do the same."""
        for link in [link for link in self._links if link.peer.id in peers]:
            broken = link.lost is not None and link.lost.cause in (LossCause.BROKEN, LossCause.UNREACHED)
            if broken or (link.lost is None and not link.same_host):
                del self._links.by_member[link.peer.id]
                self._proofs.drop(link.peer.id)
                if link.lost is None:
                    self._hang_up(link)
                link.lending.take_all_back()

    def _remove(self, link: Link) -> None:
        if link.stream is not None and not link.outbox:
            link.push_farewell(self._links.generation)
            with suppress(OSError):  # it learns of it from the closed connection
                link.stream.flush()
        if link.lost is None:  # else that is done
            self._hang_up(link)
        link.lending.take_all_back()

    def _prepare(self, link: Link) -> None:
        """Queue what the other end has to know first, before any message."""
        link.opening.begun = True
        with self.traffic.losing_without_memory(link):
            if link.same_host and self._beacon is not None:
                link.push_beacon(self._beacon.fd, self._links.generation)
            self._push_losses(link)
            self.traffic.push_notices(link)

    def _push_losses(self, link: Link) -> None:
        for member in self._ring.order:
            other = self._links.get(member)
            if other is not None and other.lost is not None and other.lost.cause is not LossCause.LEFT_US_OUT:
                link.push_loss(member, other.lost.cause, self._links.generation)

    def _connected(self, link: Link, generation: int, sock: Connection) -> None:
        if generation < self._links.generation:
            link.push_newer(self._links.generation, self._links.generation)
        self.traffic.attach(link, sock)

    def _failed(self, link: Link, reason: str, cause: LossCause) -> None:
        self.lose(link, reason, cause=cause)

    def _hang_up(self, link: Link) -> None:
        self.opener.abandon(link)
        self.traffic.detach(link)

    def _take_heard(self, link: Link) -> None:
        heard = link.heard
        self._hear_of(max(heard.left_out or 0, heard.newer))
        while heard.losses:
            self._hear_loss(*heard.losses.pop(0), heard.newest)

    def _hear_of(self, generation: int) -> None:
        if self.events.hear_of(generation):
            for link in self._along_the_ring():
                link.push_newer(generation, self._links.generation)
                self.traffic.flush(link)

    def _hear_loss(self, member: str, cause: LossCause, generation: int) -> None:
        """Note a loss that another member reports. Our own link, if any, is stronger evidence and is kept."""
        link = self._links.get(member)
        if cause not in DESCRIPTIONS or member == self._links.me:
            return
        if link is None:
            self._reports.note(member, cause, generation)
        elif link.lost is not None:
            if says_more(cause, link.lost.cause):
                self._proofs.drop(member)
                link.lost = replace(link.lost, cause=cause)
                self._tell(link.lost)
                self._maintain_ring()
        elif link.stream is not None or self.opener.is_dialling(member):
            if link.reported is None or not says_more(link.reported, cause):
                link.reported = cause
        else:
            self.lose(link, DESCRIPTIONS[cause], cause=cause)

    def process_deaths(self) -> None:
        """Lose the members whose processes were seen to end, after everything that they had sent."""
        for link, at_s in self.traffic.take_deaths():
            if link.lost is None and self._links.get(link.peer.id) is link:
                self.traffic.read(link, everything=True)
                self.lose(link, DESCRIPTIONS[LossCause.DEAD], at_s=at_s, cause=LossCause.DEAD)

    def lose(self, link: Link, reason: str, *, at_s: float | None = None, cause: LossCause = LossCause.BROKEN) -> None:
        """Note that nothing more comes over this link; tell the reader and the neighbours, once."""
        if link.lost is not None:
            return
        left_out = link.heard.left_out
        ended = left_out is None and (cause is LossCause.DEAD or link.proven_dead)
        cause, reason = judge(cause, reason, left_out=left_out, ended=ended, reported=link.reported)
        known_s = time.monotonic() if at_s is None else at_s
        link.lost = PeerLost(member=link.peer.id, reason=reason, at_s=known_s, cause=cause)
        self._hang_up(link)
        if ended:
            link.lending.take_all_back()  # no peer reads there any more
        if cause is LossCause.BROKEN and link.same_host:
            self._proofs.seek(link.peer)  # else no member may ever know: all links may have broken at once
        self._tell(link.lost)
        self._maintain_ring()

    def _tell(self, lost: PeerLost) -> None:
        self.events.put(lost)
        self._ring.untold.append(lost)

    def _along_the_ring(self) -> list[Link]:
        links = [self._links.get(member) for member in self._ring.neighbours]
        return [link for link in links if link is not None and link.opening.begun and link.lost is None]

    def _maintain_ring(self, fresh: frozenset[str] = frozenset()) -> None:
        """Tell the neighbours of losses, and close the ring around the lost. `fresh`: members just added."""
        if self._maintaining:
            return
        self._maintaining = True
        try:
            while True:
                while self._ring.untold:
                    self._tell_ring(self._ring.untold.popleft())
                if not self._close_ring(fresh):
                    break
        finally:
            self._maintaining = False

    def _tell_ring(self, lost: PeerLost) -> None:
        if lost.cause is not LossCause.LEFT_US_OUT:
            for link in self._along_the_ring():
                link.push_loss(lost.member, lost.cause, self._links.generation)
                self.traffic.flush(link)

    def _close_ring(self, fresh: frozenset[str]) -> bool:
        """Close the ring around lost members. Returns True if anything changed."""
        on_ring = [link for link in map(self._links.get, self._ring.order) if link is not None]
        lost = {link.peer.id for link in on_ring if link.lost is not None}
        nodes = {link.peer.id: link.peer.node for link in on_ring}
        new = self._ring.close(self._links.me, lost, {self._links.me: self._links.node, **nodes})
        for link in [self._links.by_member[member] for member in new]:
            if link.opening.begun and link.lost is None:
                self._push_losses(link)
                self.traffic.flush(link)
            else:
                # A member that is a neighbour only because others are lost may not know of that.
                self.opener.open(link, patient=bool(lost) or link.peer.id not in fresh)
        return bool(new or self._ring.untold)

    def next_due_s(self) -> float:
        """Return the time.monotonic() at which `run_timers` is due; inf if never."""
        return min(self.opener.next_due_s(), self.traffic.next_due_s(), self._proofs.next_due_s())

    def run_timers(self) -> None:
        """Do everything that is due."""
        now_s = time.monotonic()
        self.opener.run_timers(now_s)
        self.traffic.run_timers(now_s)
        self._proofs.run_timers(now_s)

    def close(self) -> None:
        """Say farewell on idle links and close every link."""
        self._maintaining = True
        for link in self._links:
            if link.stream is not None and not link.outbox:
                link.push_farewell(0)
                self.traffic.flush(link)
        for link in self._links:
            self._hang_up(link)
