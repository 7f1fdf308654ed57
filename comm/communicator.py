"""A communicator for programs without an engine of their own: one thread drives a mesh and executes operations.

Here lives the shell: requests from other threads, sequence numbers, deadlines, aborts. What is sent to whom is in
`algorithms`, what is done with tensors in `operations`.

A failure fails all groups on all members until the next edit: whoever fails tells the others. A member that fails may
change its tensors while others still read them. So each member has a *fence*, a counter in shared memory that it raises
before it reports a failure; whoever has read a member's tensor looks at the fence afterwards, and throws the result
away if it was raised meanwhile. No wrong number comes out of a failure.
"""

from __future__ import annotations

import collections
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from elastrain.comm.alarm import Alarm, waits_available
from elastrain.comm.board import Spot
from elastrain.comm.errors import Aborted, CommError, MemberLost, ProtocolError, Timeout
from elastrain.comm.groups import Group, MakeOperation
from elastrain.comm.lane import Lane
from elastrain.comm.lanes import Lanes, Request
from elastrain.comm.mailbox import Address, Mailbox
from elastrain.comm.mesh import Frame, How, Lost, Mesh, Newer, Peer
from elastrain.comm.operations import Operation, Seat
from elastrain.comm.segments import Imports
from elastrain.comm.work import Received, Work

_PART, _ABORT, _FENCE, _LETTER, _BOARD = 0x0101, 0x0102, 0x0103, 0x0104, 0x0105
_PART_BODY = struct.Struct("<QQBq")  # group, sequence, round, the sender's fence; the operation's words follow
_ABORT_BODY = struct.Struct("<HB")  # length of the lost member's id (0: none is lost), proven; id and reason follow
_LETTER_BODY = struct.Struct("<Qq")  # group, tag
_EARLY_MAX = 1 << 16
_STREAM_MAX_BYTES = 16 << 10
_LINGER_S = 5.0
_NOTHING = torch.empty(0)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One message of an operation."""

    words: str
    fence: int
    tensor: torch.Tensor


@dataclass(kw_only=True)
class _Reader:
    """Somebody who waits for a tagged message."""

    work: Received
    out: torch.Tensor
    deadline_s: float
    words: str


@dataclass(kw_only=True)
class _Running:
    request: Request
    operation: Operation
    number: int = 0  # the round
    sent: bool = False
    missing: set[int] = field(default_factory=set)
    fences: dict[int, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Line:
    """What goes on in one group."""

    group: Group
    queue: collections.deque[Request] = field(default_factory=collections.deque)
    running: _Running | None = None
    sequence: int = 0


class _Staging:
    """Where parts lie that travel as messages. Small ones not in shared memory: written into a stream they cost less
    than a reference.
    """

    pulls = False

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._mesh.owns(tensor)

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if numel * dtype.itemsize <= _STREAM_MAX_BYTES:
            return torch.empty(numel, dtype=dtype)
        return self._mesh.scratch(numel, dtype)

    def stage(self) -> torch.Tensor:
        raise NotImplementedError("nobody pulls where parts travel")


class Communicator:
    """Takes the mesh over: from now on only this object's thread touches it. `timeout_s`: for calls that name none."""

    def __init__(self, mesh: Mesh, *, timeout_s: float = 60.0) -> None:
        self.address = mesh.address
        self.newest_generation = 0  # that anybody was heard of in
        self.lost: dict[str, How] = {}  # members of the view, and how that became known
        self._mesh = mesh
        self._timeout_s = timeout_s
        self._fence = mesh.empty(1, torch.int64)
        self._fences: dict[str, torch.Tensor] = {}
        self._fenced: set[str] = set()  # members who were told of mine in this generation
        self._lines: dict[int, _Line] = {}
        # Parts of operations that have not come so far here, by (group, sequence, round) and member.
        self._early: dict[tuple[int, int, int], dict[str, _Part]] = {}
        self._mailbox: Mailbox[torch.Tensor, _Reader] = Mailbox()
        self._error: CommError | None = None
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._calls_lock = threading.Lock()
        self._closing = False
        self._ended = False
        self._edits_to_come = 0
        self.alarm = Alarm()
        self._pid = os.getpid()
        self._nodes = {mesh.me: mesh.node}
        self._imports: dict[str, Imports] = {}
        self._announced: set[int] = set()  # my segments that all members were told of
        self._shared_waits, _reason = waits_available()
        self._lanes = Lanes(self, mesh.me)
        self.world = self.group("world", [mesh.me])
        self._thread = threading.Thread(target=self._run, name="elastrain-communicator", daemon=True)
        self._thread.start()

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
        if group.number in self._lines:
            raise ValueError(f"there is a group {name!r} already")
        self._lines[group.number] = _Line(group=group)
        self._lanes.add(group, by_lane=self._goes_by_lane(group))
        if self._error is not None:
            self._lanes.end(self._error)
        return group

    def _goes_by_lane(self, group: Group) -> bool:
        """Whether all its members are on this host; all of them come to the same answer."""
        nodes = {self._nodes.get(member) for member in group.members}
        return self._shared_waits and (len(nodes) == 1 or self._mesh.all_on_one_host)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zero-filled 1-D tensor that members on this host read in place. See Mesh.empty."""
        return self._mesh.empty(numel, dtype)

    def edit(self, generation: int, members: Sequence[Peer], groups: Mapping[str, Sequence[str]] | None = None) -> None:
        """Take over a newer view, in place; `world` becomes its members in this order.

        `groups`: new lists of groups by name, the same on all members; names of groups that are not here mean nothing
        here. All other groups lose the removed members. What is under way ends with Aborted; what had failed works
        again. Raises what Mesh.edit raises, and ValueError for a list that names no member of the view.
        """
        self.begin_edit(generation, members, groups).wait()

    def begin_edit(
        self, generation: int, members: Sequence[Peer], groups: Mapping[str, Sequence[str]] | None = None
    ) -> Work:
        """As `edit`, without waiting: operations submitted from now on belong to the new view."""
        self._edits_to_come += 1
        return self._call_later(lambda: self._edit(generation, members, groups or {}))

    def abort(self, reason: str) -> None:
        """End whatever is under way in any group, on all members, with Aborted; so fails what follows until an edit."""
        self._call(lambda: self._break(Aborted(reason)))

    def submit(self, group: Group, make: MakeOperation, timeout_s: float | None, *, inline: bool) -> Work:
        """Used by Group."""
        self._check_open()
        timeout_s = group.timeout_s if timeout_s is None else timeout_s
        request = Request(work=Work(), make=make, deadline_s=time.monotonic() + timeout_s, timeout_s=timeout_s)
        if self._edits_to_come:  # it belongs to the view that comes
            self._post(lambda: self._hand_on(group, request))
        elif not self._lanes.submit(group, request, inline=inline):
            self._post(lambda: self._enqueue(self._lines[group.number], request))
        return request.work

    def _hand_on(self, group: Group, request: Request) -> None:
        if not self._lanes.submit(group, request, inline=False):
            self._enqueue(self._lines[group.number], request)

    def _check_open(self) -> None:
        if self._ended or os.getpid() != self._pid:
            raise CommError("this communicator is closed, or belongs to the process that forked this one")

    def post(self, group: Group, tensor: torch.Tensor, to: int, tag: int) -> Work:
        """Used by Group: the tensor is copied before this returns."""
        work, staged = Work(), self._mesh.scratch(max(tensor.numel(), 1), tensor.dtype)[: tensor.numel()]
        staged.view(tensor.shape).copy_(tensor)
        body, member = _LETTER_BODY.pack(group.number, tag), group.members[to]

        def run() -> None:
            if self._error is None:
                self._send(member, _LETTER, body, (staged,))
            work.finish(self._error)

        self._post(run)
        return work

    def await_letter(
        self, group: Group, out: torch.Tensor, of: int | None, tag: int, timeout_s: float | None
    ) -> Received:
        """Used by Group."""
        timeout_s = group.timeout_s if timeout_s is None else timeout_s
        source = None if of is None else group.members[of]
        words = f"nothing tagged {tag} from {'anybody' if source is None else source} within {timeout_s} s"
        work = Received()
        reader = _Reader(work=work, out=out, deadline_s=time.monotonic() + timeout_s, words=words)
        address = Address(group=group.number, source=source, tag=tag)
        self._post(lambda: self._read(address, reader))
        return work

    def close(self) -> None:
        """End the thread and the mesh; whatever is under way ends with Aborted."""
        self._closing = True
        self._mesh.wake()
        self._thread.join()
        self._lanes.close()

    # For lanes (see lane.Host and lanes.Failing), from any thread

    def why_silent(self, member: str) -> CommError | None:
        if self.lost.get(member) is How.LEFT:
            return MemberLost(member, "it left")
        return Aborted(f"{member!r} went on to a newer view") if self._mesh.is_ahead(member) else None

    def place(self, tensor: torch.Tensor) -> Spot | None:
        place = self._mesh.place(tensor)
        if place is None:
            return None
        segment = place.region.segment
        if segment.number not in self._announced:
            self._call(lambda: self._mesh.announce(segment))
            self._announced.add(segment.number)
        return Spot(segment=segment.number, offset_bytes=place.offset_bytes)

    def segment(self, member: str, number: int) -> torch.Tensor | None:
        imports = self._imports.get(member)
        return None if imports is None else imports.whole(number)

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._mesh.scratch(numel, dtype)

    def show_board(self, group: int, members: tuple[str, ...], board: torch.Tensor) -> None:
        def run() -> None:
            for member in members:
                self._send(member, _BOARD, group.to_bytes(8, "little"), (board,))

        self._call(run)

    def fail(self, lane: Lane, error: MemberLost | Aborted | Timeout) -> CommError:
        def run() -> None:
            if lane.error is None:
                self._break(error)

        try:
            self._call(run)
        except CommError:
            pass  # closed meanwhile, which has ended the lane
        return lane.error or error

    def _post(self, call: Callable[[], None]) -> None:
        with self._calls_lock:
            if self._ended:
                raise CommError("this communicator is closed, or belongs to the process that forked this one")
            self._calls.append(call)
        self._mesh.wake()

    def _call(self, call: Callable[[], None]) -> None:
        self._call_later(call).wait()

    def _call_later(self, call: Callable[[], None]) -> Work:
        work = Work()

        def run() -> None:
            try:
                call()
            except (CommError, ValueError) as error:
                work.finish(error)
            else:
                work.finish()

        self._post(run)
        return work

    # The thread

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # of this thread: what is communicated may belong to a graph, communicating never
        try:
            while not self._closing:
                self._turn()
        except Exception as error:  # noqa: BLE001 - the edge of the thread: every waiter learns what happened
            self._end(CommError(f"the communicator's thread failed: {error!r}"))
        else:
            self._end(Aborted("this communicator was closed"))
            self._linger()
        self._mesh.close()

    def _turn(self) -> None:
        events = self._mesh.poll(self._wait_s())
        for event in events:
            if isinstance(event, Frame):
                self._receive(event)
            elif isinstance(event, Lost):
                self._lose(event)
            elif isinstance(event, Newer):
                self.newest_generation = event.generation
        while self._calls:
            self._calls.popleft()()
        self._check_silent()
        self._check_deadlines()
        if self._lanes.anybody_waits:
            self.alarm.ring()  # whatever it was: they look for themselves

    def _wait_s(self) -> float | None:
        deadlines = [line.running.request.deadline_s for line in list(self._lines.values()) if line.running]
        deadlines += [reader.deadline_s for _, reader in self._mailbox.readers]
        return max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None

    def _end(self, error: CommError) -> None:
        self._fail(error)
        with self._calls_lock:
            self._ended = True
        while self._calls:
            self._calls.popleft()()  # operations fail at once now; nobody is left waiting
        self.alarm.ring()

    def _linger(self) -> None:
        """Send what others may still need of operations that are done here."""
        deadline_s = time.monotonic() + _LINGER_S
        while self._mesh.unsent_bytes and time.monotonic() < deadline_s:
            self._mesh.poll(deadline_s - time.monotonic())

    def _edit(self, generation: int, members: Sequence[Peer], groups: Mapping[str, Sequence[str]]) -> None:
        self._edits_to_come -= 1
        _check_lists(groups, [peer.id for peer in members])
        self._mesh.edit(generation, members)
        told = self._error is not None
        self._fail(Aborted(f"the view changed to generation {generation}"))
        self._error = None
        self._fences.clear()
        self._fenced.clear()
        self._early.clear()
        self.lost = {}
        self._announced.clear()
        self._nodes = {peer.id: peer.node for peer in members}
        imports = {peer.id: self._mesh.imports(peer.id) for peer in members}
        self._imports = {member: found for member, found in imports.items() if found is not None}
        self.world.members = tuple(peer.id for peer in members)
        for line in list(self._lines.values()):
            line.sequence = 0
            wanted = groups.get(line.group.name, line.group.members)
            line.group.members = tuple(member for member in wanted if member in self.world.members)
        self._lanes.renew(generation, self.world.members, self._goes_by_lane)
        for member in () if told else self.world.members:
            self._show_fence(member)  # who still waits in the old view learns from it that nothing more comes

    def _send(self, member: str, kind: int, body: bytes, tensors: Sequence[torch.Tensor] = ()) -> None:
        try:
            self._mesh.send(member, kind, body, tensors)
        except MemberLost:
            pass  # the mesh tells of it once, in the next poll: that is where it is dealt with

    # Operations

    def _enqueue(self, line: _Line, request: Request) -> None:
        if self._error is not None:
            request.work.finish(self._error)
        else:
            line.queue.append(request)
            self._advance(line)

    def _advance(self, line: _Line) -> None:
        """Go on until something is missing."""
        while line.running is not None or line.queue:
            running = line.running or self._start(line)
            if running is None:
                return
            if running.number == len(running.operation.rounds):
                line.running = None
                line.sequence += 1
                running.request.work.finish()
                continue
            if not running.sent:
                self._send_round(line, running)
            if line.running is None or running.missing:
                return
            self._finish_round(line, running)

    def _start(self, line: _Line) -> _Running | None:
        request = line.queue.popleft()
        seat = Seat(rank=line.group.rank, world=line.group.size, memory=_Staging(self._mesh))
        try:
            line.running = _Running(request=request, operation=request.make(seat))
        except (ValueError, RuntimeError) as error:  # torch raises RuntimeError for tensors that do not fit
            request.work.finish(ValueError(str(error)))
            self._break(Aborted(f"{self._mesh.me!r} could not begin: {error}"))
        return line.running

    def _send_round(self, line: _Line, running: _Running) -> None:
        operation, number = running.operation, running.number
        running.sent = True
        running.missing = set(operation.rounds[number].awaits)
        running.fences.clear()
        sends = operation.rounds[number].sends
        if sends:
            fence = int(self._fence.item())
            body = _PART_BODY.pack(line.group.number, line.sequence, number, fence) + operation.words.encode()
            offered = operation.offer(number)
            for send in sends:
                self._send_part(line.group.members[send.to], body, offered[send.start : send.stop])
        for member, part in self._early.pop((line.group.number, line.sequence, number), {}).items():
            self._take(line, member, part)

    def _send_part(self, member: str, body: bytes, piece: torch.Tensor) -> None:
        if not piece.numel():
            self._send(member, _PART, body)
            return
        self._show_fence(member)
        self._send(member, _PART, body, (piece,))

    def _show_fence(self, member: str) -> None:
        """Once per view, before anything that is read in place."""
        if member != self._mesh.me and member not in self._fenced:
            self._fenced.add(member)
            self._send(member, _FENCE, b"", (self._fence,))

    def _take(self, line: _Line, member: str, part: _Part) -> None:
        running = line.running
        if running is None:
            return
        words = running.operation.words
        rank = line.group.members.index(member) if member in line.group.members else -1
        if part.words != words or rank not in running.missing:
            self._break(Aborted(f"{line.group.name!r}: {words} at {self._mesh.me!r}, {part.words} at {member!r}"))
            return
        try:
            running.operation.take(running.number, rank, part.tensor)
        except ValueError as error:
            self._break(Aborted(f"{words} of {line.group.name!r} at {self._mesh.me!r}: {error}"))
            return
        running.missing.discard(rank)
        if part.tensor.numel():
            running.fences[rank] = part.fence

    def _finish_round(self, line: _Line, running: _Running) -> None:
        running.operation.finish(running.number)
        running.missing = {rank for rank, fence in running.fences.items() if self._gave_up(line, rank, fence)}
        if not running.missing:
            running.number += 1
            running.sent = False

    def _gave_up(self, line: _Line, rank: int, fence: int) -> bool:
        """Whether a member failed after it had sent its part. Its tensor may have changed while it was read: the
        operation can not end well, and waits for that member's word why, for its death, or for the next view.
        """
        view = self._fences.get(line.group.members[rank])
        return view is None or int(view[0].item()) != fence

    def _receive(self, frame: Frame) -> None:
        if frame.kind == _FENCE:
            self._fences[frame.source] = frame.tensors[0]
        elif frame.kind == _BOARD:
            self._hear_board(frame, int.from_bytes(frame.body, "little"), frame.tensors[0])
        elif frame.kind == _ABORT:
            self._hear_abort(frame)
        elif frame.kind == _PART:
            self._hear_part(frame)
        elif frame.kind == _LETTER and self._error is None:
            number, tag = _LETTER_BODY.unpack_from(frame.body)
            sent = Address(group=number, source=frame.source, tag=tag)
            reader = self._mailbox.put(sent, frame.tensors[0])
            if reader is not None:
                self._hand_over(reader, frame.source, frame.tensors[0])

    def _read(self, address: Address, reader: _Reader) -> None:
        if self._error is not None:
            reader.work.finish(self._error)
            return
        found = self._mailbox.take(address, reader)
        if found is not None:
            self._hand_over(reader, found[0].source or "", found[1])

    def _hand_over(self, reader: _Reader, source: str, tensor: torch.Tensor) -> None:
        out = reader.out
        if (tensor.numel(), tensor.dtype) != (out.numel(), out.dtype):
            reader.work.finish(
                ValueError(
                    f"{tensor.dtype}[{tensor.numel()}] came from {source!r}, {out.dtype}[{out.numel()}] was awaited"
                )
            )
            return
        out.copy_(tensor.view(out.shape))
        reader.work.source = source
        reader.work.finish()

    def _hear_board(self, frame: Frame, group: int, board: torch.Tensor) -> None:
        try:
            self._lanes.hear_board(group, frame.source, board)
        except ProtocolError as error:
            self._break(Aborted(f"{frame.source!r} sent {error}"))

    def _hear_part(self, frame: Frame) -> None:
        if self._error is not None:
            return
        number, sequence, round_number, fence = _PART_BODY.unpack_from(frame.body)
        words = frame.body[_PART_BODY.size :].decode()
        part = _Part(words=words, fence=fence, tensor=frame.tensors[0] if frame.tensors else _NOTHING)
        line = self._lines.get(number)
        running = line.running if line else None
        if line and running and running.sent and (sequence, round_number) == (line.sequence, running.number):
            self._take(line, frame.source, part)
            self._advance(line)
        elif len(self._early) < _EARLY_MAX:
            self._early.setdefault((number, sequence, round_number), {})[frame.source] = part
        else:
            self._break(Aborted(f"{self._mesh.me!r} is {_EARLY_MAX} operations behind {frame.source!r}"))

    # Failures

    def _lose(self, lost: Lost) -> None:
        self.lost[lost.member] = lost.how
        if lost.how is not How.LEFT:
            self._break(MemberLost(lost.member, lost.reason))

    def _check_silent(self) -> None:
        """Fail what awaits somebody who will send nothing more, though nothing is wrong with it.

        Links keep the order of frames: who has left, or is in a newer generation, has sent all that it ever will.
        """
        for line in list(self._lines.values()):
            missing = line.running.missing if line.running else ()
            for member in (line.group.members[rank] for rank in sorted(missing)):
                if self.lost.get(member) is How.LEFT:
                    self._break(MemberLost(member, "it left"))
                    return
                if self._mesh.is_ahead(member):
                    self._break(Aborted(f"{member!r} went on to a newer view"))
                    return

    def _hear_abort(self, frame: Frame) -> None:
        id_bytes, proven = _ABORT_BODY.unpack_from(frame.body)
        text = frame.body[_ABORT_BODY.size :]
        member, reason = text[:id_bytes].decode(), text[id_bytes:].decode()
        if member and self.lost.get(member) is not How.LEFT:
            self.lost[member] = How.DEAD if proven else self.lost.get(member, How.BROKEN)
        if self._error is None:
            self._fail(MemberLost(member, reason) if member else Aborted(reason))

    def _check_deadlines(self) -> None:
        now_s = time.monotonic()
        for line in list(self._lines.values()):
            if line.running is not None and line.running.request.deadline_s <= now_s:
                missing = tuple(line.group.members[rank] for rank in sorted(line.running.missing))
                words, timeout_s = line.running.operation.words, line.running.request.timeout_s
                self._break(
                    Timeout(f"{words}: nothing from {', '.join(missing)} within {timeout_s} s", missing=missing)
                )
        for _, reader in self._mailbox.readers:
            if reader.deadline_s <= now_s:
                self._break(Timeout(reader.words))
                return

    def _break(self, error: MemberLost | Aborted | Timeout) -> None:
        """Fail here, and tell the others."""
        if self._error is not None:
            return
        lost = error.member.encode() if isinstance(error, MemberLost) else b""
        proven = isinstance(error, MemberLost) and self.lost.get(error.member) is How.DEAD
        reason = str(error) if isinstance(error, Timeout) else error.reason
        self._fail(error)
        for member in self.world.members:
            if member != self._mesh.me:
                body = _ABORT_BODY.pack(len(lost), proven) + lost + f"{reason} (told by {self._mesh.me!r})".encode()
                self._send(member, _ABORT, body)

    def _fail(self, error: CommError) -> None:
        """End everything that is under way, in all groups."""
        self._error = self._error or error
        self._early.clear()
        requests: list[Request] = []
        for line in list(self._lines.values()):
            requests += [*([line.running.request] if line.running else []), *line.queue]
            line.running = None
            line.queue.clear()
        if requests:
            # Their callers may change the tensors from here on. (After a success no peer reads them any more.)
            self._fence += 1
            self._mesh.copy_unsent()
        self._lanes.end(error)
        for request in requests:
            request.work.finish(error)
        for reader in self._mailbox.clear():
            reader.work.finish(error)


def _check_lists(groups: Mapping[str, Sequence[str]], members: Sequence[str]) -> None:
    for name, wanted in groups.items():
        if not set(wanted) <= set(members) or len(set(wanted)) != len(wanted):
            raise ValueError(f"group {name!r} must list members of the view {members}, each once; got {wanted}")
