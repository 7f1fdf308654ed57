"""A communicator for programs without an engine of their own: it drives a mesh and all groups over it.

Here live requests, edits and failures; who carries them out in which thread is in `driver`. Operations are executed in
`lanes` on one host, in `lines` between hosts; tagged messages are in `letters`.

A failure fails all groups on all members until the next edit: whoever fails tells the others.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from elastrain.comm.errors import Aborted, CommError, MemberLost, ProtocolError, Timeout
from elastrain.comm.groups.board import Spot
from elastrain.comm.groups.driver import Driver
from elastrain.comm.groups.group import Group, MakeOperation
from elastrain.comm.groups.kinds import Kind, only_tensor, unpack
from elastrain.comm.groups.lane import Lane
from elastrain.comm.groups.lanes import Lanes, Request
from elastrain.comm.groups.letters import Letters, Reader
from elastrain.comm.groups.lines import Lines, why_gone
from elastrain.comm.groups.mailbox import Address
from elastrain.comm.groups.work import Received, Work
from elastrain.comm.shm.alarm import Alarm, waits_available
from elastrain.comm.shm.imports import Imports
from elastrain.comm.shm.segments import Segment
from elastrain.comm.wire.mesh import Mesh
from elastrain.comm.wire.values import Event, Frame, LossCause, Newer, Peer, PeerLost

_ABORT_BODY = struct.Struct("<HB")  # length of the lost member's id (0: none is lost), flags; id and reason follow
_PROVEN = 1  # that it has ended
_TOLD_ALL = 2  # by the first who tells; else who hears it hands it on
_BOARD_BODY = struct.Struct("<Q")  # group
_LINGER_S = 5.0
_DROP_AFTER_S = 0.2  # unmapping the memory of the dead takes milliseconds or more: the survivors go on first


class Edit:
    """A view that is being taken over here. `work`: done when what is submitted belongs to it."""

    def __init__(self, work: Work, lanes: Lanes) -> None:
        self.work, self._lanes = work, lanes

    def wait(self) -> None:
        """Until it has been taken over, and nothing of former views writes into its caller's tensors any more.

        Raises as Communicator.edit.
        """
        self.work.wait()
        self._lanes.await_former()


class Communicator:
    """Takes the mesh over: from now on only this object touches it, by one thread at a time. `timeout_s`: for calls
    that name none.
    """

    def __init__(self, mesh: Mesh, *, timeout_s: float = 60.0) -> None:
        self.address = mesh.address
        self.newest_generation = 0  # that anybody was heard of in
        self.lost: dict[str, LossCause] = {}  # members of the view, and how that became known
        self._mesh = mesh
        self._timeout_s = timeout_s
        self._error: CommError | None = None
        self._ahead_lock = threading.Lock()
        self._ahead = 0  # calls that wait for the thread, and that later operations must not overtake
        self.alarm = Alarm()
        self._driver = Driver(mesh, self)
        self._nodes = {mesh.me: mesh.node}
        self._hosts: dict[str, int] = {}  # of members; none: all are on one
        self._imports: dict[str, Imports] = {}
        self._former: list[object] = []  # of views before, with the memory of the dead: to be dropped at `_drop_s`
        self._drop_s = 0.0
        self._announced: set[int] = set()  # my segments that all members were told of
        self._shared_waits, _reason = waits_available()
        self._lanes = Lanes(self, mesh.me)
        self._lines = Lines(self, mesh)
        self._letters = Letters(self, self._lines, mesh.me)
        self.world = self.group("world", [mesh.me])
        self._driver.start()

    # For any thread

    @property
    def error(self) -> CommError | None:
        """What made everything fail until the next edit; None when all is well."""
        return self._error

    def group(self, name: str, members: Sequence[str], *, timeout_s: float | None = None) -> Group:
        """A group under this name; `timeout_s` for its calls that name none.

        Raises ValueError when the name is taken, or the list does not name me.
        """
        group = Group(self, name=name, me=self._mesh.me, members=members, timeout_s=timeout_s or self._timeout_s)
        self._lines.add(group)
        self._lanes.add(group, by_lane=self._goes_by_lane(group))
        if self._error is not None:
            self._lanes.end(self._error)
        return group

    def _goes_by_lane(self, group: Group) -> bool:
        """Whether all its members are on this host; all of them come to the same answer."""
        nodes = set(map(self._nodes.get, group.members))
        return self._shared_waits and (len(nodes) == 1 or self._mesh.all_on_one_host)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zero-filled 1-D tensor that members on this host read in place. See SharedMemory.empty."""
        return self._mesh.memory.empty(numel, dtype)

    def edit(self, generation: int, members: Sequence[Peer], groups: Mapping[str, Sequence[str]] | None = None) -> None:
        """Take over a newer view, in place; `world` becomes its members in this order.

        `groups`: new lists of groups by name, the same on all members; names of groups that are not here mean nothing
        here. All other groups lose the removed members. What is under way ends with Aborted, or well where all that it
        needs had come; it has ended when this returns, so that all tensors are their owners' again. What had failed
        works again. Raises what Mesh.edit raises, and ValueError for a list that names no member of the view.
        """
        self.begin_edit(generation, members, groups).wait()

    def begin_edit(
        self, generation: int, members: Sequence[Peer], groups: Mapping[str, Sequence[str]] | None = None
    ) -> Edit:
        """As `edit`, without waiting for others: operations submitted from now on belong to the new view."""
        work = self._driver.call_later(self._in_order(partial(self._edit, generation, members, groups or {})))
        return Edit(work, self._lanes)

    def abort(self, reason: str) -> None:
        """End whatever is under way in any group, on all members, with Aborted; so fails what follows until an edit."""
        self._driver.call(lambda: self.break_off(Aborted(reason)))

    def submit(
        self, group: Group, make: MakeOperation, timeout_s: float | None, *, inline: bool, barrier: bool = False
    ) -> Work:
        """Used by Group."""
        self._driver.check_open()
        timeout_s = group.timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        request = Request(work=Work(), make=make, deadline_s=deadline_s, timeout_s=timeout_s, barrier=barrier)
        if self._ahead:  # an edit: it belongs to the view that comes; or an operation that waits for one
            self._driver.post(self._in_order(lambda: self._hand_on(group, request)))
        elif not self._lanes.submit(group, request, inline=inline):
            self._driver.post(lambda: self._lines.enqueue(group, request))
        return request.work

    def _hand_on(self, group: Group, request: Request) -> None:
        if not self._lanes.submit(group, request, inline=False):
            self._lines.enqueue(group, request)

    def _in_order(self, call: Callable[[], None]) -> Callable[[], None]:
        """Counted as ahead of what is submitted, until it has been carried out."""

        def run() -> None:
            try:
                call()
            finally:
                with self._ahead_lock:
                    self._ahead -= 1

        with self._ahead_lock:
            self._ahead += 1
        return run

    def post(self, group: Group, tensor: torch.Tensor, to: int, tag: int) -> Work:
        """Used by Group: the tensor is copied before this returns."""
        work, staged = Work(), self._mesh.memory.scratch(max(tensor.numel(), 1), tensor.dtype)[: tensor.numel()]
        staged.view(tensor.shape).copy_(tensor)
        to_member, number = group.members[to], group.number
        self._driver.post(lambda: self._letters.post(work, group=number, to=to_member, tag=tag, tensor=staged))
        return work

    def await_letter(
        self, group: Group, out: torch.Tensor, of: int | None, tag: int, timeout_s: float | None
    ) -> Received:
        """Used by Group."""
        timeout_s = group.timeout_s if timeout_s is None else timeout_s
        source = None if of is None else group.members[of]
        words = f"nothing tagged {tag} from {'anybody' if source is None else source} within {timeout_s} s"
        work = Received()
        reader = Reader(work=work, out=out, deadline_s=time.monotonic() + timeout_s, words=words)
        address = Address(group=group.number, source=source, tag=tag)
        sources = tuple(group.members) if source is None else (source,)

        def read() -> None:
            self._mesh.connect(sources)
            self._letters.read(address, reader)

        self._driver.post(read)
        return work

    def close(self) -> None:
        """End the thread and the mesh; whatever is under way ends with Aborted."""
        self._driver.close()
        self._lanes.close()

    # For lanes (see lane.Host and lanes.Failing), from any thread

    def why_gone(self, member: str) -> MemberLost | None:
        return why_gone(self.lost, member)

    def is_linked(self, member: str) -> bool:
        return member in self._imports and member not in self.lost

    def is_ahead(self, member: str) -> bool:
        return self._mesh.links.is_ahead(member)

    def place(self, tensor: torch.Tensor) -> Spot | None:
        place = self._mesh.memory.find(tensor)
        if place is None:
            return None
        segment = place.region.segment
        if segment.number not in self._announced:
            self._driver.call(lambda: self._announce(segment))
        return Spot(segment=segment.number, offset_bytes=place.offset_bytes)

    def _announce(self, segment: Segment) -> None:
        self._mesh.announce(segment)
        self._announced.add(segment.number)

    def segment(self, member: str, number: int) -> torch.Tensor | None:
        imports = self._imports.get(member)
        return None if imports is None else imports.whole(number)

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._mesh.memory.scratch(numel, dtype)

    def show_board(self, group: int, members: tuple[str, ...], board: torch.Tensor) -> None:
        def run() -> None:
            self._announced.clear()  # they may have had no link when the others were told
            for member in members:
                self.send(member, Kind.BOARD, _BOARD_BODY.pack(group), (board,))

        self._driver.call(run)

    def fail(self, lane: Lane, error: MemberLost | Aborted | Timeout) -> CommError:
        def run() -> None:
            if lane.error is None:
                self.break_off(error)

        try:
            self._driver.call(run)
        except CommError:
            pass  # closed meanwhile, which has ended the lane
        return lane.error or error

    # See driver.Driven

    def hear(self, event: Event) -> None:
        if isinstance(event, Frame):
            self._receive(event)
        elif isinstance(event, PeerLost):
            self._lose(event)
        elif isinstance(event, Newer):
            self.newest_generation = event.generation

    def check(self) -> None:
        if self._former and time.monotonic() >= self._drop_s:
            self._former.clear()
        self._lines.check()
        overdue = self._letters.overdue()
        if overdue is not None:
            self.break_off(overdue)
        if self._lanes.anybody_waits:
            self.alarm.ring()  # whatever it was: they look for themselves

    def next_due_s(self) -> float | None:
        # While somebody is lost the thread looks in anyway: so the edit that follows need not wake it for this.
        drop_s = self._drop_s if self._former else time.monotonic() + _DROP_AFTER_S if self.lost else None
        deadlines = (self._lines.next_deadline_s(), self._letters.next_deadline_s(), drop_s)
        return min([deadline for deadline in deadlines if deadline is not None], default=None)

    def stop(self, error: CommError) -> None:
        self._fail(error)

    def linger(self) -> None:
        """Send what others may still need of operations that are done here."""
        deadline_s = time.monotonic() + _LINGER_S
        while self._mesh.links.unsent_bytes and time.monotonic() < deadline_s:
            self._mesh.poll(deadline_s - time.monotonic())

    # By one thread at a time, as all that follows

    def _edit(self, generation: int, members: Sequence[Peer], groups: Mapping[str, Sequence[str]]) -> None:
        ids = tuple([peer.id for peer in members])
        _check_lists(groups, ids)
        if not set(self.world.members) <= set(ids):
            self._lines.raise_fence()  # what the removed still read is used again from here on
        self._mesh.edit(generation, members)
        told = self._error is not None
        if not told:  # else all that was under way has ended, and what came since has failed
            self._fail(Aborted(f"the view changed to generation {generation}"))
        self._error = None
        self.lost = {}
        self._announced.clear()
        self._nodes = {peer.id: peer.node for peer in members}
        self._hosts = {} if self._mesh.all_on_one_host else _numbers(self._nodes)
        self._drop_s = self._drop_s if self._former else time.monotonic() + _DROP_AFTER_S
        self._former.append(self._imports)
        self._imports = self._mesh.links.imports()
        self.world.members = ids
        self._lines.renew(ids, groups)
        self._former.append(self._lanes.renew(generation, ids, self._goes_by_lane))
        if not told:
            self._mesh.tell_generation()  # who still waits in the old view learns from it that nothing more comes

    # For lines and letters, in this thread

    def send(self, member: str, kind: int, body: bytes, tensors: Sequence[torch.Tensor] = ()) -> None:
        try:
            self._mesh.send(member, kind, body, tensors)
        except MemberLost:
            pass  # the mesh tells of it once, in the next poll: that is where it is dealt with

    def host_of(self, member: str) -> int:
        return self._hosts.get(member, 0)

    # What others say

    def _receive(self, frame: Frame) -> None:
        try:
            self._understand(frame)
        except ProtocolError as error:
            self._lose(PeerLost(member=frame.source, reason=f"it broke the protocol: {error}", at_s=time.monotonic()))

    def _understand(self, frame: Frame) -> None:
        if frame.kind == Kind.FENCE:
            self._lines.hear_fence(frame)
        elif frame.kind == Kind.BOARD:
            (group,), _ = unpack(_BOARD_BODY, frame)
            self._lanes.hear_board(group, frame.source, only_tensor(frame))
        elif frame.kind == Kind.ABORT:
            self._hear_abort(frame)
        elif frame.kind == Kind.PART:
            self._lines.hear_part(frame)
        elif frame.kind == Kind.LETTER:
            self._letters.receive(frame)
        else:
            raise ProtocolError(f"a frame of unknown kind {frame.kind:#x}")

    # Failures

    def _lose(self, lost: PeerLost) -> None:
        self.lost[lost.member] = lost.cause
        if lost.cause not in (LossCause.LEFT, LossCause.UNREACHED):
            self.break_off(MemberLost(lost.member, lost.reason))

    def _hear_abort(self, frame: Frame) -> None:
        (id_bytes, flags), text = unpack(_ABORT_BODY, frame)
        member, reason = text[:id_bytes].decode(errors="replace"), text[id_bytes:].decode(errors="replace")
        if member and self.lost.get(member) is not LossCause.LEFT:
            known = self.lost.get(member)
            self.lost[member] = (
                LossCause.DEAD
                if flags & _PROVEN
                else LossCause.BROKEN
                if known in (None, LossCause.UNREACHED)
                else known
            )
        if self._error is None:
            self._fail(MemberLost(member, reason) if member else Aborted(reason))
            if not flags & _TOLD_ALL:
                self._mesh.broadcast(Kind.ABORT, frame.body)

    def break_off(self, error: MemberLost | Aborted | Timeout) -> None:
        """Fail here, and tell the others."""
        if self._error is not None:
            return
        lost = error.member.encode() if isinstance(error, MemberLost) else b""
        proven = isinstance(error, MemberLost) and self.lost.get(error.member) is LossCause.DEAD
        reason = str(error) if isinstance(error, Timeout) else error.reason
        flags = _PROVEN * proven + _TOLD_ALL * self._mesh.links.complete
        body = _ABORT_BODY.pack(len(lost), flags) + lost + f"{reason} (told by {self._mesh.me!r})".encode()
        self._fail(error)
        self._mesh.broadcast(Kind.ABORT, body)

    def _fail(self, error: CommError) -> None:
        """End everything that is under way, in all groups."""
        self._error = self._error or error
        requests = self._lines.end()
        self._lanes.end(error)
        for request in requests:
            request.work.finish(error)
        self._letters.end(error)


def _numbers(nodes: Mapping[str, str]) -> dict[str, int]:
    """The number of each member's node; none where there is one node only."""
    names = set(nodes.values())
    numbers = {node: number for number, node in enumerate(sorted(names))} if len(names) > 1 else {}
    return {member: numbers[node] for member, node in nodes.items()} if numbers else {}


def _check_lists(groups: Mapping[str, Sequence[str]], members: Sequence[str]) -> None:
    for name, wanted in groups.items():
        if not set(wanted) <= set(members) or len(set(wanted)) != len(wanted):
            raise ValueError(f"group {name!r} must list members of the view {members}, each once; got {wanted}")
