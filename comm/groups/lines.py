"""Groups whose members are not all on one host: operations by messages, executed by the communicator's thread.

A message carries the group's operation and round that it belongs to; what comes early waits.

A member that fails may change its tensors while others still read them. So each member has a *fence*, a counter in
shared memory that it raises before it reports a failure; whoever has read a member's tensor looks at the fence
afterwards, and throws the result away if it was raised meanwhile. No wrong number comes out of a failure.
"""

from __future__ import annotations

import collections
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from elastrain.comm.collectives.operations import Operation, Seat
from elastrain.comm.errors import Aborted, CommError, MemberLost, OutOfMemory, Timeout
from elastrain.comm.groups.group import Group
from elastrain.comm.groups.kinds import Kind, only_tensor, unpack
from elastrain.comm.groups.lanes import Request
from elastrain.comm.wire.frames import tensor_bytes
from elastrain.comm.wire.mesh import Mesh
from elastrain.comm.wire.values import Frame, LossCause

_BODY = struct.Struct("<QQBq")  # group, sequence, round, the sender's fence; the operation's words follow
_EARLY_MAX = 1 << 16
_STREAM_MAX_BYTES = 16 << 10
_NOTHING = torch.empty(0)


class Breaking(Protocol):
    """What lines ask of their communicator; by its thread."""

    lost: dict[str, LossCause]

    @property
    def error(self) -> CommError | None: ...

    def send(self, member: str, kind: int, body: bytes, tensors: Sequence[torch.Tensor] = ()) -> None: ...

    def host_of(self, member: str) -> int:
        """A number that all members of this member's host have, and no others."""

    def break_off(self, error: MemberLost | Aborted | Timeout) -> None:
        """Fail everything here, and tell the others."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One message of an operation."""

    words: str
    fence: int
    tensor: torch.Tensor


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

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._mesh.memory.find(tensor) is not None

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if numel * dtype.itemsize <= _STREAM_MAX_BYTES:
            return torch.empty(numel, dtype=dtype)
        return self._mesh.memory.scratch(numel, dtype)


class Lines:
    """Used by the communicator's thread; `add` by any."""

    def __init__(self, host: Breaking, mesh: Mesh) -> None:
        self._host, self._mesh = host, mesh
        self._fence = mesh.memory.empty(1, torch.int64)
        self._count = tensor_bytes(self._fence).cast("q")  # the same memory: torch's own ways to it take long
        self._fences: dict[str, torch.Tensor] = {}
        self._fenced: set[str] = set()  # members who were told of mine in this generation
        self._lines: dict[int, _Line] = {}
        # Parts of operations that have not come so far here, by (group, sequence, round) and member.
        self._early: dict[tuple[int, int, int], dict[str, _Part]] = {}

    def add(self, group: Group) -> None:
        """Raises ValueError when the name is taken."""
        if group.number in self._lines:
            raise ValueError(f"there is a group {group.name!r} already")
        self._lines[group.number] = _Line(group=group)

    def renew(self, members: Sequence[str], lists: Mapping[str, Sequence[str]]) -> None:
        """Begin a generation: groups get their new lists, or lose who is not in the view. All has been ended."""
        # A member's fence is the same for its whole life.
        self._fences = {member: fence for member, fence in self._fences.items() if member in members}
        self._fenced.clear()
        self._early.clear()
        for line in list(self._lines.values()):
            line.sequence = 0
            wanted = lists.get(line.group.name, line.group.members)
            line.group.members = tuple([member for member in wanted if member in members])

    def enqueue(self, group: Group, request: Request) -> None:
        if self._host.error is not None:
            request.work.finish(self._host.error)
        else:
            line = self._lines[group.number]
            line.queue.append(request)
            self._advance(line)

    def _advance(self, line: _Line) -> None:
        try:
            self._go_on(line)
        except (OutOfMemory, RuntimeError) as error:  # torch raises RuntimeError where memory is at its end
            self._host.break_off(Aborted(f"{self._mesh.me!r} can not go on in {line.group.name!r}: {error}"))

    def _go_on(self, line: _Line) -> None:
        """Until something is missing."""
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
        group = line.group
        hosts = tuple(self._host.host_of(member) for member in group.members)
        seat = Seat(rank=group.rank, world=group.size, memory=_Staging(self._mesh), hosts=hosts)
        try:
            line.running = _Running(request=request, operation=request.make(seat))
        except (ValueError, RuntimeError, OutOfMemory) as error:  # torch raises RuntimeError for what does not fit
            request.work.finish(error if isinstance(error, OutOfMemory) else ValueError(str(error)))
            self._host.break_off(Aborted(f"{self._mesh.me!r} could not begin: {error}"))
        return line.running

    def _send_round(self, line: _Line, running: _Running) -> None:
        operation, number = running.operation, running.number
        running.sent = True
        running.missing = set(operation.rounds[number].awaits)
        running.fences.clear()
        self._mesh.connect(line.group.members[rank] for rank in running.missing)
        sends = operation.rounds[number].sends
        if sends:
            body = _BODY.pack(line.group.number, line.sequence, number, self.fence) + operation.words.encode()
            offered = operation.offer(number)
            for send in sends:
                self._send_part(line.group.members[send.to], body, offered[send.start : send.stop])
        for member, part in self._early.pop((line.group.number, line.sequence, number), {}).items():
            self._take(line, member, part)

    def _send_part(self, member: str, body: bytes, piece: torch.Tensor) -> None:
        if not piece.numel():
            self._host.send(member, Kind.PART, body)
            return
        self.show_fence(member)
        self._host.send(member, Kind.PART, body, (piece,))

    def show_fence(self, member: str) -> None:
        """Once per view, before anything that is read in place."""
        if member != self._mesh.me and member not in self._fenced:
            self._fenced.add(member)
            self._host.send(member, Kind.FENCE, b"", (self._fence,))

    def hear_fence(self, frame: Frame) -> None:
        """Raises ProtocolError."""
        self._fences[frame.source] = only_tensor(frame, dtype=torch.int64, numel=1)

    def hear_part(self, frame: Frame) -> None:
        """Raises ProtocolError."""
        (number, sequence, round_number, fence), said = unpack(_BODY, frame)
        tensor = only_tensor(frame) if frame.tensors else _NOTHING
        part = _Part(words=said.decode(errors="replace"), fence=fence, tensor=tensor)
        if self._host.error is not None:
            return
        line = self._lines.get(number)
        running = line.running if line else None
        if line and running and running.sent and (sequence, round_number) == (line.sequence, running.number):
            self._take(line, frame.source, part)
            self._advance(line)
        elif len(self._early) < _EARLY_MAX:
            self._early.setdefault((number, sequence, round_number), {})[frame.source] = part
        else:
            words = f"{self._mesh.me!r} is {_EARLY_MAX} operations behind {frame.source!r}"
            self._host.break_off(Aborted(words))

    def _take(self, line: _Line, member: str, part: _Part) -> None:
        running = line.running
        if running is None:
            return
        words = running.operation.words
        rank = line.group.members.index(member) if member in line.group.members else -1
        if part.words != words or rank not in running.missing:
            disagreement = f"{line.group.name!r}: {words} at {self._mesh.me!r}, {part.words} at {member!r}"
            self._host.break_off(Aborted(disagreement))
            return
        try:
            running.operation.take(running.number, rank, part.tensor)
        except ValueError as error:
            self._host.break_off(Aborted(f"{words} of {line.group.name!r} at {self._mesh.me!r}: {error}"))
            return
        running.missing.discard(rank)
        if part.tensor.numel():
            running.fences[rank] = part.fence

    def _finish_round(self, line: _Line, running: _Running) -> None:
        running.operation.finish(running.number)
        running.missing = {r for r, fence in running.fences.items() if self.gave_up(line.group.members[r], fence)}
        if not running.missing:
            running.number += 1
            running.sent = False

    def gave_up(self, member: str, fence: int) -> bool:
        """Whether a member failed after it had sent what carries this fence. Its tensor may have changed while it was
        read: the operation can not end well, and waits for that member's word why, for its death, or for the next view.
        """
        view = self._fences.get(member)
        return view is None or int(view[0].item()) != fence

    def next_deadline_s(self) -> float | None:
        """In time.monotonic(); None: nothing is under way."""
        running = [line.running for line in list(self._lines.values()) if line.running]
        return min([one.request.deadline_s for one in running], default=None)

    def check(self) -> None:
        """Fail what has run out of time, and what awaits somebody who will send nothing more.

        Links keep the order of frames: who has left, or is in a newer generation, has sent all that it ever will,
        though nothing is wrong with it.
        """
        now_s = time.monotonic()
        for line in list(self._lines.values()):
            if line.running is None:
                continue
            missing = tuple(line.group.members[rank] for rank in sorted(line.running.missing))
            error: MemberLost | Aborted | Timeout | None = self._why_silent(missing)
            if error is None and line.running.request.deadline_s <= now_s:
                words, timeout_s = line.running.operation.words, line.running.request.timeout_s
                error = Timeout(f"{words}: nothing from {', '.join(missing)} within {timeout_s} s", missing=missing)
            if error is not None:
                self._host.break_off(error)
                return

    def _why_silent(self, missing: Sequence[str]) -> MemberLost | Aborted | None:
        for member in missing:
            gone = why_gone(self._host.lost, member)
            if gone is not None:
                return gone
            if self._mesh.links.is_ahead(member):
                return Aborted(f"{member!r} went on to a newer view")
        return None

    def end(self) -> list[Request]:
        """Drop everything; returns what was under way or waited to be, whose callers are to be told."""
        self._early.clear()
        requests: list[Request] = []
        for line in list(self._lines.values()):
            requests += [*([line.running.request] if line.running else []), *line.queue]
            line.running = None
            line.queue.clear()
        if requests:
            # Their callers may change the tensors from here on. (After a success no peer reads them any more.)
            self.raise_fence()
            self._mesh.links.copy_unsent()
        return requests

    @property
    def fence(self) -> int:
        """Mine, to be sent with everything that is read in place."""
        return self._count[0]

    def raise_fence(self) -> None:
        """Before memory changes that others may still read."""
        self._count[0] += 1


def why_gone(lost: Mapping[str, LossCause], member: str | None) -> MemberLost | None:
    """The error of who waits for a member whose end alone breaks nothing off."""
    cause = lost.get(member or "")
    if cause is LossCause.LEFT:
        return MemberLost(member or "", "it left")
    return MemberLost(member or "", "it could not be reached") if cause is LossCause.UNREACHED else None
