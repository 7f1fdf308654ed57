"""The mesh: authenticated links to the members of the view, edited in place, driven by one thread that polls.

Links along a ring of the members always stand; all others are opened when they are needed first. What is to be known to
all (losses, newer views) is handed on along the ring, so a link to a member is not needed to learn of its loss. A
caller that waits for a member asks for a link to it, and learns of its end there.

Links that both the old and the new view have are not touched by an edit: same sockets, same segments. Frames of older
generations are discarded; newer ones are held until an edit reaches them. Collectives and protocols live above.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from elastrain.base.event_loop import EventLoop
from elastrain.comm.errors import CommError, MemberLost
from elastrain.comm.shm.device_segments import DeviceShare
from elastrain.comm.shm.liveness import Beacon
from elastrain.comm.shm.segments import Segment, SharedMemory
from elastrain.comm.shm.shared_memory import Pin
from elastrain.comm.wire.addresses import Credentials, Event, Frame, MeshConfig, Peer
from elastrain.comm.wire.connections import LinkPlan, MeshConnections
from elastrain.comm.wire.frames import FIRST_CONTROL_KIND
from elastrain.comm.wire.link_table import LinkTable
from elastrain.comm.wire.ports import with_device_domain


class Mesh:
    """Links to all members of a view.

    Not thread-safe, except `wake` and `memory`. While one thread is in `sleep`, another may call anything.

    `memory`: tensors that members on this host read in place (`memory.empty`); `links`: one for each other member, and
    what can be asked about all of them. `address`: where other members reach this one.
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
        """`secret`: the job's; None is accepted only where strangers cannot connect (UNIX sockets and loopback).

        `beacon`: tells same-host peers of this process's death within milliseconds; made in the main thread, it stays
        the caller's. Without one, peers learn of a death when the socket closes.
        """
        self.me, self.node = me, node
        self._config = config = config or MeshConfig()
        self.memory = SharedMemory(config.segment_bytes, huge_pages=config.huge_pages)
        self.links = LinkTable(me, node)
        self._loop = EventLoop()
        try:
            credentials = Credentials(job=job, secret=secret)
            self._connections = MeshConnections(self.links, self._loop, self.memory, credentials, config, beacon)
        except (OSError, ValueError):
            self._loop.close()
            raise
        self._events = self._connections.events
        self.address = self._connections.opener.address
        self._closed = False
        _meshes.add(self)

    @property
    def generation(self) -> int:
        """The generation of the view; 0 before the first."""
        return self.links.generation

    @property
    def members(self) -> tuple[str, ...]:
        """All members of the view, lost ones and this one included, sorted."""
        return self.links.members

    @property
    def all_on_one_host(self) -> bool:
        """True if all members share memory, whatever their node names."""
        return self._config.transport == "unix"

    def edit(self, generation: int, members: Sequence[Peer], *, links: LinkPlan = "ring", renew: bool = False) -> None:
        """Take over a newer view, in place: links of removed members close, those to new neighbours on the ring open.

        `links`: "all" opens those to all added members at once, where each will talk to each anyway; there is no ring
        then. `renew`: links to other hosts, and broken ones, are made anew, also to members that stay. Both are the
        same on all members.

        Of two members the later one dials (see `dials`): a newcomer's links stand ready before the others take over the
        view that names it. Frames of older generations are discarded from now on; frames held for exactly this one come
        with the next poll; so does PeerLost, once more, for a member of the new view that was lost before. Raises
        ValueError for a generation that is not newer, a view without me, an id named twice, an address that is none.
        """
        self._check_open()
        peers = {peer.id: peer for peer in members}
        if generation <= self.links.generation or len(peers) != len(members) or self.me not in peers:
            raise ValueError(
                f"generation {generation} after {self.generation}, with {sorted(peer.id for peer in members)}:"
                f" a view is newer than the last one and names every member once, {self.me!r} included"
            )
        del peers[self.me]
        self._connections.edit(generation, peers, links, renew=renew)

    def send(self, member: str, kind: int, body: bytes = b"", tensors: Sequence[torch.Tensor] = ()) -> None:
        """Queue a frame of this generation, in order per member; never blocks.

        Tensors of `memory.empty` (or contiguous parts of them) travel to members on this host by reference, all others
        are written into the stream **without being copied first**: either way a tensor must not change before the
        receiver has answered. Memory that is freed or collected meanwhile is not used again before that. Raises
        MemberLost for a member that is lost or not in the view, ValueError for what cannot be sent.
        """
        self._check_open()
        if not 0 <= kind < FIRST_CONTROL_KIND or len(body) > self._config.caps.max_body_bytes:
            raise ValueError(f"kind {kind} or a body of {len(body)} bytes is out of range")
        if member == self.me:
            own = tuple(tensor.detach() for tensor in tensors)
            frame = Frame(source=self.me, generation=self.generation, kind=kind, body=bytes(body), tensors=own)
            self._events.put(frame)
            return
        link = self.links.get(member)
        if link is None:
            raise MemberLost(member, f"it is not in the view of generation {self.generation}")
        link.opening.used = True
        self._connections.opener.open(link, patient=True)
        if link.lost is not None:
            raise MemberLost(member, link.lost.reason)
        self._connections.traffic.send(link, kind, body, tensors)
        if link.outbox.size_bytes > self._config.max_send_queue_bytes:
            self._connections.lose(link, f"it does not read: {link.outbox.size_bytes} bytes wait to be sent")

    def pin(self, pin: Pin) -> None:
        """Pin shared memory where it lies, this process's and its peers', for a device. Call it before the first view.

        Args:
            pin: Function that pins one mapping as long as it exists.
        """
        self.memory.pin = self._connections.pin = pin

    def share(self, share: DeviceShare) -> None:
        """Let members of this host that are in the same domain read device memory. Call it before the first view.

        `address` names the domain from then on.
        """
        self.links.share = share
        self.address = with_device_domain(self.address, share.domain)

    def tamper(self, change: Callable[[memoryview], memoryview]) -> None:
        """Alter outgoing bytes, for injected faults. Call this before the first view.

        `change` gets the bytes that go to the kernel, sealed if the connection is sealed, and returns those to send
        instead.
        """
        self._connections.traffic.tamper = change

    def connect(self, members: Iterable[str]) -> None:
        """Bring links about to these members of the view, before something is awaited from them.

        The end of a member is then seen on its link. A member that cannot be reached is told as PeerLost; a member that
        does not answer is not, so a caller that awaits a message needs a deadline.
        """
        self._check_open()
        for link in map(self.links.get, members):
            if link is not None:
                self._connections.opener.open(link, patient=True)

    def broadcast(self, kind: int, body: bytes) -> None:
        """Queue a frame of this generation to all whose links stand, and first of all on those that are opened later.

        Receivers that forward each frame once flood it to every member.
        """
        self._check_open()
        self._connections.traffic.broadcast(kind, body)

    def tell_generation(self) -> None:
        """Tell this member's generation on all standing links: nothing of former ones follows."""
        self._check_open()
        self._connections.traffic.tell_generation()

    def announce(self, segment: Segment) -> None:
        """Pass a segment of mine to all members on this host that have a link and do not have it."""
        self._connections.traffic.announce(segment)

    # Polling: whole, and in pieces for several threads of which one at a time uses the mesh

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait until something happened, at most `timeout_s`, and return it in order per member.

        The list may be empty: the time is up, `wake` was called, or something went on inside.
        """
        self._check_open()
        self.tidy_up()
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        return self.serve(self.sleep(min(until_s, self.next_due_s())))

    def tidy_up(self) -> None:
        """Tell peers of segments that are gone, and take note of deaths. To be called before any sleep."""
        self._connections.traffic.tell_gone(self.memory.take_gone())
        if self.links.share is not None:
            self._connections.traffic.tell_gone(self.links.share.memory.take_gone())
        self._connections.process_deaths()

    def next_due_s(self) -> float:
        """Return the time.monotonic() at which something is due: 0 if events wait, inf if nothing is due."""
        return 0.0 if self._events else self._connections.next_due_s()

    def sleep(self, until_s: float) -> Sequence[tuple[int, int]]:
        """Wait until something is ready, at the latest until time.monotonic() is `until_s` (inf: no such time).

        Returns what is ready, for `serve`. Others may use the mesh meanwhile; they wake the sleeper for what has to
        happen earlier.
        """
        return self._loop.wait(None if until_s == math.inf else max(until_s - time.monotonic(), 0.0))

    def serve(self, ready: Sequence[tuple[int, int]]) -> list[Event]:
        """Go on with what is ready and what is due; returns as `poll`."""
        self._check_open()
        self._loop.serve(ready)
        self._connections.process_deaths()
        self._connections.run_timers()
        return self._events.take()

    def wake(self) -> None:
        """Make a running or the next poll return soon. Safe from any thread."""
        self._loop.wake()

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` inside poll whenever `fd` is readable (or at its end)."""
        self._loop.register(fd, lambda _events: callback())

    def close(self) -> None:
        """Close every link, tell the peers, and give all descriptors and threads back.

        What is not sent yet is dropped. Received tensors, and those of `memory`, stay valid.
        """
        if not self._closed:
            self._connections.close()
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._closed = True
        self._connections.opener.close()
        self._loop.close()
        self.memory.close()
        if self.links.share is not None:
            self.links.share.memory.close()

    def _after_fork(self) -> None:
        """Close, in a forked child, everything that would keep the links open after the parent's death."""
        for link in self.links:
            if link.stream is not None:
                link.stream.close()
            if link.opening.request is not None:
                link.opening.request.close()
        if not self._closed:
            self._close_descriptors()
        self._loop.close_in_child()

    def _check_open(self) -> None:
        if self._closed:
            raise CommError("this mesh is closed, or belongs to the process that forked this one")


_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()  # of this process, for forks: a hook cannot be taken back


def _after_fork_in_child() -> None:
    for mesh in list(_meshes):
        mesh._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
