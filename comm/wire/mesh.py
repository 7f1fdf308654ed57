"""The mesh: authenticated links to the members of the view, edited in place, driven by one thread that polls.

Links along a ring of the members always stand; all others are opened when they are needed first. What is to be known to
all (losses, newer views) is handed on along the ring, so a link to somebody is not needed to learn of its loss. Who
waits for somebody asks for a link to it, and learns of its end there.

Links that both the old and the new view have are not touched by an edit: same sockets, same segments. Frames of older
generations are discarded; newer ones are held until an edit reaches them. Collectives and protocols live above.
"""

from __future__ import annotations

import collections
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch

from elastrain.comm.errors import CommError, MemberLost
from elastrain.comm.shm.liveness import Beacon
from elastrain.comm.shm.segments import Imports, Place, Segment
from elastrain.comm.wire.door import choose_address
from elastrain.comm.wire.frames import FIRST_CONTROL_KIND
from elastrain.comm.wire.link import Link
from elastrain.comm.wire.loop import READ
from elastrain.comm.wire.values import Frame, MeshConfig, Newer, Peer
from elastrain.comm.wire.wires import Event, Wires, dials, in_order


class Mesh(Wires):
    """Used by one thread at a time; only `wake`, `empty` and `free` may be called beside, and anything beside `sleep`.

    `secret`: the job's; None is accepted only where strangers can not connect (UNIX sockets and loopback).
    `beacon`: tells same-host peers of this process's death within milliseconds; made in the main thread, stays the
    caller's. Without one, peers learn of a death when the socket closes.
    """

    def __init__(
        self,
        *,
        me: str,
        node: str,
        job: str,
        secret: bytes | None,
        config: MeshConfig | None = None,
        beacon: Beacon | None = None,
    ) -> None:
        super().__init__(me=me, node=node, job=job, secret=secret, config=config or MeshConfig(), beacon=beacon)
        self._closed = False
        self.address = self._door.address
        _meshes.add(self)

    @property
    def members(self) -> tuple[str, ...]:
        """Everybody in the view, the lost ones too, sorted; me included."""
        return tuple(sorted([self.me, *self._links]))

    @property
    def all_on_one_host(self) -> bool:
        """Whether members reach each other by shared memory whatever their nodes are called."""
        return self._config.transport == "unix"

    # The view

    def edit(self, generation: int, members: Sequence[Peer], *, links: Literal["ring", "all"] = "ring") -> None:
        """Take over a newer view, in place: links of removed members close, those to new neighbours on the ring open.

        `links`: "all" opens those to all added members at once, where each will talk to each anyway; there is no ring
        then. The same on all members.

        Of two members the later one dials (see `dials`): a newcomer's links stand ready before the others take over the
        view that names it. Frames of older generations are discarded from now on; frames held for exactly this one come
        with the next poll; so does Lost, once more, for a member of the new view that was lost before. Raises
        ValueError for a generation that is not newer, a view without me, an id named twice, an address that is none.
        """
        self._check_open()
        peers = {peer.id: peer for peer in members}
        if generation <= self.generation or len(peers) != len(members) or self.me not in peers:
            raise ValueError(
                f"generation {generation} after {self.generation}, with {sorted(peer.id for peer in members)}:"
                f" a view is newer than the last one and names every member once, {self.me!r} included"
            )
        del peers[self.me]
        added = [peer for member, peer in peers.items() if member not in self._links]
        for peer in added:
            if dials(self.me, peer.id):
                choose_address(peer.address, same_node=peer.node == self.node)
        gone = {member: link for member, link in self._links.items() if member not in peers}
        shrinks = links == "ring" and bool(self._order) and not added  # the ring
        self._tending = True  # not before the view is whole
        try:
            self._change(generation, gone, added)
        finally:
            self._tending = False
        if shrinks:
            self._order = tuple([member for member in self._order if member not in gone])
        else:
            self._order = tuple(sorted(self.members, key=in_order)) if links == "ring" else ()
        self._fresh = frozenset([peer.id for peer in added])
        for link in [self._links[peer.id] for peer in added] if links == "all" else []:
            self._open(link, patient=False)
        # Around who was lost it was closed when that became known.
        if not shrinks or self._untold or None in [link.lost for link in gone.values()]:
            self._tend()
        self._fresh = frozenset()

    def _change(self, generation: int, gone: Iterable[str], added: Sequence[Peer]) -> None:
        self.generation = self._door.generation = generation
        self._newest_told = max(self._newest_told, generation)
        self._words.clear()
        for member in gone:
            self._remove(member)
        self._forget_the_past()
        known_lost = [link for link in self._links.values() if link.lost is not None]
        for peer in added:
            self._add(peer)
        self._rumours = {member: told for member, told in self._rumours.items() if told[1] > generation}
        for member in [m for m, (_, newest) in self._aside.items() if newest <= generation]:
            self._aside.pop(member)[0].close()
        for link in self._links.values():
            if link.held:
                self._deliver_held(link)
        for link in known_lost:
            self._tell_lost(link)
            self._untold.append(link)

    def _forget_the_past(self) -> None:
        kept = [
            event
            for event in self._ready
            if (isinstance(event, Frame) and event.generation >= self.generation)
            or (isinstance(event, Newer) and event.generation > self.generation)
        ]
        self._ready = collections.deque(kept)

    def _remove(self, member: str) -> None:
        link = self._links.pop(member)
        if link.stream is not None and not link.outbox:
            link.push_farewell(self.generation)
            try:
                link.stream.flush()
            except OSError:
                pass  # it learns of it from the closed connection
        if link.lost is None:  # else that is done
            self._hang_up(link)
        link.take_all_back()

    def _add(self, peer: Peer) -> None:
        same_node = peer.node == self.node
        by_unix = same_node or self._config.transport == "unix"
        link = self._links[peer.id] = Link(peer, same_node=same_node, same_host=by_unix, shared=self._shared)
        if peer.id in self._aside:
            sock, generation = self._aside.pop(peer.id)
            self._let_in(link, generation, sock)
        if peer.id in self._rumours:
            how, generation = self._rumours.pop(peer.id)
            self._hear_loss(peer.id, how, generation=generation)

    def _deliver_held(self, link: Link) -> None:
        due = [frame for frame in link.held if frame.generation == self.generation]
        link.held = [frame for frame in link.held if frame.generation > self.generation]
        self._ready.extend(due)
        self._set_events(link)

    # Messages

    def send(self, member: str, kind: int, body: bytes = b"", tensors: Sequence[torch.Tensor] = ()) -> None:
        """Queue a frame of this generation, in order per member; never blocks.

        Tensors of `empty` (or contiguous parts of them) travel to members on this host by reference, all others are
        written into the stream **without being copied first**: either way a tensor must not change before the receiver
        has answered. Memory of `empty` that is freed or collected meanwhile is not used again before that.
        Raises MemberLost for a member that is lost or not in the view, ValueError for what can not be sent.
        """
        self._check_open()
        if not 0 <= kind < FIRST_CONTROL_KIND or len(body) > self._config.max_body_bytes:
            raise ValueError(f"kind {kind} or a body of {len(body)} bytes is out of range")
        if member == self.me:
            own = tuple(tensor.detach() for tensor in tensors)
            self._ready.append(
                Frame(source=self.me, generation=self.generation, kind=kind, body=bytes(body), tensors=own)
            )
            return
        link = self._links.get(member)
        if link is None:
            raise MemberLost(member, f"it is not in the view of generation {self.generation}")
        link.used = True
        self._open(link, patient=True)
        if link.lost is not None:
            raise MemberLost(member, link.lost)
        self._put(link, kind, body, tensors)
        if link.outbox.size_bytes > self._config.max_send_queue_bytes:
            self._lose(link, f"it does not read: {link.outbox.size_bytes} bytes wait to be sent")

    def _put(self, link: Link, kind: int, body: bytes, tensors: Sequence[torch.Tensor] = ()) -> None:
        waiting = bool(link.outbox)
        with self._serving(link):
            link.push(kind, self.generation, body, tensors)
        if not waiting:
            self._flush(link)

    def connect(self, members: Iterable[str]) -> None:
        """Bring links about to these of the view, for who awaits something from them: who waits learns of the end of
        whom it waits for. What can not be reached is told as Lost; time out who does not answer yourself.
        """
        self._check_open()
        for member in members:
            link = self._links.get(member)
            if link is not None:
                self._open(link, patient=True)

    def spread(self, kind: int, body: bytes) -> None:
        """Queue a frame of this generation to all whose links stand, and first of all on those that are opened later.

        Who hands such frames on, when it hears them first, makes them known to all.
        """
        self._check_open()
        self._words.append((kind, body))
        for link in list(self._links.values()):
            if link.opened and link.lost is None:
                self._put(link, kind, body)

    def tell_generation(self) -> None:
        """Let all whose links stand know of mine: nothing of former ones follows."""
        self._check_open()
        for link in list(self._links.values()):
            if link.stream is not None:
                link.push_newer(self.generation, self.generation)
                self._flush(link)

    @property
    def linked_to_all(self) -> bool:
        """Whether links stand to all who are not lost."""
        return all(link.stream is not None or link.lost is not None for link in self._links.values())

    def copy_unsent(self) -> None:
        """Copy what waits in streams: those tensors may change from now on. For ends before their time."""
        for link in self._links.values():
            link.outbox.copy()

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait until something happened, at most `timeout_s`, and return it in order per member.

        The list may be empty: the time is up, `wake` was called, or something went on inside.
        """
        self._check_open()
        self.tidy_up()
        if self.has_news:
            timeout_s = 0.0
        due_s = self.next_due_s()
        if due_s is not None:
            wait_s = max(due_s - time.monotonic(), 0.0)
            timeout_s = wait_s if timeout_s is None else min(wait_s, timeout_s)
        return self.serve(self._loop.wait(timeout_s))

    # `poll` in pieces, for several threads of which one at a time uses the mesh

    def tidy_up(self) -> None:
        """Before any sleep: tell peers of segments that are gone, and note who has died."""
        self._tell_gone()
        self._bury()

    @property
    def has_news(self) -> bool:
        """Whether `serve` would return events at once."""
        return bool(self._ready)

    def sleep(self, until_s: float) -> Sequence[tuple[int, int]]:
        """Wait until something is ready, at the latest until time.monotonic() is `until_s` (inf: no such time).

        What is, for `serve`. Others may use the mesh meanwhile, who wake the sleeper for what has to be earlier.
        """
        return self._loop.wait(None if until_s == math.inf else max(until_s - time.monotonic(), 0.0))

    def serve(self, ready: Sequence[tuple[int, int]]) -> list[Event]:
        """Go on with what is ready and what is due; returns as `poll`."""
        self._check_open()
        self._loop.serve(ready)
        self._bury()
        self._run_timers()
        events = list(self._ready)
        self._ready.clear()
        return events

    def _tell_gone(self) -> None:
        for number in self._shared.take_gone():
            for link in self._links.values():
                if link.lost is None:
                    link.push_gone(number, self.generation)
                    self._flush(link)

    def is_ahead(self, member: str) -> bool:
        """Whether this member is known to be in a newer generation: nothing of this one comes from it any more."""
        link = self._links.get(member)
        return link is not None and link.newest > self.generation

    @property
    def unsent_bytes(self) -> int:
        """What waits to be sent to members that are not lost."""
        links = [link for link in self._links.values() if link.lost is None and (link.used or link.stream is not None)]
        return sum(link.outbox.size_bytes for link in links)

    def wake(self) -> None:
        """Make a running or the next poll return soon. Safe from any thread."""
        self._loop.wake()

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` inside poll whenever `fd` is readable (or at its end)."""
        self._loop.register(fd, READ, lambda _events: callback())

    def unwatch(self, fd: int) -> None:
        """To be called before `fd` is closed."""
        self._loop.unregister(fd)

    # Memory

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zero-filled 1-D tensor in a sealed shared segment of mine, 64-byte aligned. Safe from any thread.

        The memory comes back when the tensor and all its views are collected, or `free` was called, and every receiver
        has let go of its references. Raises ValueError if `numel` is not positive, and OutOfMemory.
        """
        return self._shared.empty(numel, dtype)

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """As `empty`, but with any content."""
        return self._shared.empty(numel, dtype, zero=False)

    def shared_bytes(self) -> int:
        """What the kernel holds in memory for the shared segments of mine."""
        return self._shared.resident_bytes()

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether this contiguous tensor lies in memory of `empty`. Safe from any thread."""
        return self.place(tensor) is not None

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where this contiguous tensor lies in memory of `empty`; None if it does not. Safe from any thread."""
        return self._shared.find(tensor)

    def announce(self, segment: Segment) -> None:
        """Pass a segment of mine to all members on this host that have a link and do not have it."""
        for link in list(self._links.values()):
            if link.same_host and link.opened and link.lost is None:
                with self._serving(link):
                    link.announce(segment, self.generation)
                self._flush(link)

    def imports(self) -> dict[str, Imports]:
        """What each other member of the view on this host has passed, now and later. They outlive its link."""
        return {member: link.imports for member, link in self._links.items() if link.same_host}

    def free(self, tensor: torch.Tensor) -> None:
        """Give a tensor of `empty` back now; nobody here may touch it afterwards. Raises ValueError for others."""
        self._shared.free(tensor)

    # Ending

    def close(self) -> None:
        """Close every link, tell the peers, and give all descriptors and threads back.

        What is not sent yet is dropped. Received tensors, and those of `empty`, stay valid.
        """
        if self._closed:
            return
        self._tending = True  # never again
        for link in self._links.values():
            if link.stream is not None and not link.outbox:
                link.push_farewell(0)
                self._flush(link)
        for link in self._links.values():
            self._hang_up(link)
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._closed = True
        for sock in [*self._door.sockets(), *(sock for sock, _ in self._aside.values())]:
            sock.close()
        self._loop.close()
        self._shared.close()

    def _after_fork(self) -> None:
        """In a forked child: close everything that would keep the links open after the parent's death."""
        for link in self._links.values():
            if link.stream is not None:
                link.stream.close()
            if link.knock is not None:
                link.knock.close()
        if not self._closed:
            self._close_descriptors()

    def _check_open(self) -> None:
        if self._closed:
            raise CommError("this mesh is closed, or belongs to the process that forked this one")


_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()  # of this process, for forks: one hook can not be taken back


def _after_fork_in_child() -> None:
    for mesh in list(_meshes):
        mesh._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
