"""Executes the operations of groups whose members are not all on one host: by messages, in the communicator's thread.

A message carries the group's operation and round that it belongs to; what comes early waits. What is read in place on
the sender's host is checked by its fence afterwards (see `fences`).
"""

from __future__ import annotations

import collections
import math
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from elastrain.comm.collectives.reducing import Operation, Participant
from elastrain.comm.errors import Aborted, CommError, MemberLost, OutOfMemory, Timeout
from elastrain.comm.groups.communicator_failure import GroupFailures
from elastrain.comm.groups.members import FrameKind, MemberList, Placement, only_tensor, send, unpack
from elastrain.comm.groups.waits import ReadValidation
from elastrain.comm.groups.works import OperationRequest
from elastrain.comm.wire.addresses import Frame
from elastrain.comm.wire.mesh import Mesh

_BODY = struct.Struct("<QQBq")  # group, sequence, round, the sender's fence; the operation's description follows
_EARLY_MAX = 1 << 16
_STREAM_MAX_BYTES = 16 << 10
_NOTHING = torch.empty(0)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One message of an operation."""

    description: str
    fence: int
    tensor: torch.Tensor


@dataclass(kw_only=True)
class _Running:
    request: OperationRequest
    operation: Operation
    number: int = 0  # the round
    sent: bool = False
    missing: set[int] = field(default_factory=set)
    fences: dict[int, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class _GroupQueue:
    """The operations of one group: one that is under way, and those that wait."""

    group: MemberList
    requests: collections.deque[OperationRequest] = field(default_factory=collections.deque)
    running: _Running | None = None
    sequence: int = 0


class _Staging:
    """Memory for parts that travel as messages: small ones lie outside shared memory, where a stream takes them.

    Written into a stream they cost less than a reference.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._mesh.memory.find(tensor) is not None

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if numel * dtype.itemsize <= _STREAM_MAX_BYTES:
            return torch.empty(numel, dtype=dtype)
        return self._mesh.memory.scratch(numel, dtype)


class MessageExecutor:
    """Executor of operations by messages. The communicator's thread uses it; any thread may call `add`."""

    def __init__(self, failures: GroupFailures, fences: ReadValidation, placement: Placement, mesh: Mesh) -> None:
        self._failures, self._fences, self._placement, self._mesh = failures, fences, placement, mesh
        self._queues: dict[int, _GroupQueue] = {}
        # Parts of operations that have not come so far here, by (group, sequence, round) and member.
        self._early: dict[tuple[int, int, int], dict[str, _Part]] = {}

    def add(self, group: MemberList) -> None:
        """Add a group. Raises ValueError if the name is taken."""
        if group.number in self._queues:
            raise ValueError(f"there is a group {group.name!r} already")
        self._queues[group.number] = _GroupQueue(group=group)

    def renew(self, members: Sequence[str], lists: Mapping[str, Sequence[str]]) -> None:
        """Begin a generation of the view with these members.

        A group in `lists` gets its new list of members; every other group loses the members that have left the view.
        The caller has ended all operations before.
        """
        self._fences.renew(members)
        self._early.clear()
        for queue in list(self._queues.values()):
            queue.sequence = 0
            wanted = lists.get(queue.group.name, queue.group.members)
            queue.group.members = tuple([member for member in wanted if member in members])

    def enqueue(self, group: MemberList, request: OperationRequest) -> None:
        """Execute an operation after those of its group before it."""
        if self._failures.error is not None:
            request.work.finish(self._failures.error)
        else:
            queue = self._queues[group.number]
            queue.requests.append(request)
            self._advance(queue)

    def _advance(self, queue: _GroupQueue) -> None:
        try:
            self._go_on(queue)
        except (OutOfMemory, RuntimeError) as error:  # torch raises RuntimeError where memory is at its end
            self._failures.break_off(Aborted(f"{self._mesh.me!r} cannot go on in {queue.group.name!r}: {error}"))

    def _go_on(self, queue: _GroupQueue) -> None:
        """Carry out operations until something is missing."""
        while queue.running is not None or queue.requests:
            running = queue.running or self._start(queue)
            if running is None:
                return
            if running.number == len(running.operation.rounds):
                queue.running = None
                queue.sequence += 1
                queue.group.trail.end(well=True)
                running.request.work.finish()
                continue
            if not running.sent:
                self._send_round(queue, running)
            if queue.running is None or running.missing:
                return
            self._finish_round(queue, running)

    def _start(self, queue: _GroupQueue) -> _Running | None:
        request = queue.requests.popleft()
        group = queue.group
        hosts = tuple(self._placement.host_of(member) for member in group.members)
        participant = Participant(rank=group.rank, world=group.size, memory=_Staging(self._mesh), hosts=hosts)
        try:
            operation = request.make(participant)
            group.trail.begin(operation.description)
            queue.running = _Running(request=request, operation=operation)
        except (ValueError, RuntimeError, OutOfMemory) as error:  # torch raises RuntimeError for what does not fit
            request.work.finish(error if isinstance(error, OutOfMemory) else ValueError(str(error)))
            self._failures.break_off(Aborted(f"{self._mesh.me!r} could not begin: {error}"))
        return queue.running

    def _send_round(self, queue: _GroupQueue, running: _Running) -> None:
        operation, number = running.operation, running.number
        running.sent = True
        running.missing = set(operation.rounds[number].awaits)
        running.fences.clear()
        self._mesh.connect(queue.group.members[rank] for rank in running.missing)
        sends = operation.rounds[number].sends
        if sends:
            head = _BODY.pack(queue.group.number, queue.sequence, number, self._fences.mine)
            body = head + operation.description.encode()
            offered = operation.offer(number)
            for each in sends:
                self._send_part(queue.group.members[each.to], body, offered[each.start : each.stop])
        for member, part in self._early.pop((queue.group.number, queue.sequence, number), {}).items():
            self._take(queue, member, part)

    def _send_part(self, member: str, body: bytes, piece: torch.Tensor) -> None:
        if not piece.numel():
            send(self._mesh, member, FrameKind.PART, body)
            return
        self._fences.show(member)
        send(self._mesh, member, FrameKind.PART, body, (piece,))

    def hear_part(self, frame: Frame) -> None:
        """Take a message of an operation. Raises ProtocolError."""
        (number, sequence, round_number, fence), said = unpack(_BODY, frame)
        tensor = only_tensor(frame) if frame.tensors else _NOTHING
        part = _Part(description=said.decode(errors="replace"), fence=fence, tensor=tensor)
        if self._failures.error is not None:
            return
        queue = self._queues.get(number)
        running = queue.running if queue else None
        if queue and running and running.sent and (sequence, round_number) == (queue.sequence, running.number):
            self._take(queue, frame.source, part)
            self._advance(queue)
        elif len(self._early) < _EARLY_MAX:
            self._early.setdefault((number, sequence, round_number), {})[frame.source] = part
        else:
            description = f"{self._mesh.me!r} is {_EARLY_MAX} operations behind {frame.source!r}"
            self._failures.break_off(Aborted(description))

    def _take(self, queue: _GroupQueue, member: str, part: _Part) -> None:
        running = queue.running
        if running is None:
            return
        description = running.operation.description
        rank = queue.group.members.index(member) if member in queue.group.members else -1
        if part.description != description or rank not in running.missing:
            disagreement = f"{queue.group.name!r}: {description} at {self._mesh.me!r}, {part.description} at {member!r}"
            self._failures.break_off(Aborted(disagreement))
            return
        try:
            running.operation.take(running.number, rank, part.tensor)
        except ValueError as error:
            self._failures.break_off(Aborted(f"{description} of {queue.group.name!r} at {self._mesh.me!r}: {error}"))
            return
        running.missing.discard(rank)
        if part.tensor.numel():
            running.fences[rank] = part.fence

    def _finish_round(self, queue: _GroupQueue, running: _Running) -> None:
        running.operation.finish(running.number)
        members = queue.group.members
        running.missing = {r for r, fence in running.fences.items() if self._fences.was_raised(members[r], fence)}
        if not running.missing:
            running.number += 1
            running.sent = False

    def next_deadline_s(self) -> float:
        """When `check` has something to do, in time.monotonic(); inf: nothing is under way."""
        queues = list(self._queues.values())
        return min([queue.running.request.deadline_s for queue in queues if queue.running], default=math.inf)

    def check(self) -> None:
        """Fail what has run out of time, and what awaits a member that will send nothing more.

        Links keep the order of frames: a member that has left, or is in a newer generation, has sent all that it ever
        will, though nothing is wrong with it.
        """
        now_s = time.monotonic()
        for queue in list(self._queues.values()):
            if queue.running is None:
                continue
            missing = tuple(queue.group.members[rank] for rank in sorted(queue.running.missing))
            error: MemberLost | Aborted | Timeout | None = self._why_silent(missing)
            if error is None and queue.running.request.deadline_s <= now_s:
                description, timeout_s = queue.running.operation.description, queue.running.request.timeout_s
                error = Timeout(
                    f"{description}: nothing from {', '.join(missing)} within {timeout_s} s", missing=missing
                )
            if error is not None:
                self._failures.break_off(error)
                return

    def _why_silent(self, missing: Sequence[str]) -> MemberLost | Aborted | None:
        for member in missing:
            gone = self._failures.why_gone(member)
            if gone is not None:
                return gone
            if self._mesh.links.is_ahead(member):
                return Aborted(f"{member!r} went on to a newer view")
        return None

    def end(self, error: CommError) -> None:
        """Fail all operations, in progress or queued."""
        self._early.clear()
        requests: list[OperationRequest] = []
        for queue in list(self._queues.values()):
            if queue.running is not None:
                queue.group.trail.end(well=False)
                requests.append(queue.running.request)
            requests += queue.requests
            queue.running = None
            queue.requests.clear()
        if requests:
            # Their callers may change the tensors from here on. (After a success no peer reads them any more.)
            self._fences.raise_mine()
            self._mesh.links.copy_unsent()
        for request in requests:
            request.work.finish(error)
