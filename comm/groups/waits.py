"""Waits for what other members show in shared memory, and the check that a tensor did not change while it was read.

`RingWaits` sleeps until a word of another member changes or an alarm rings. An error of the communicator ends waits,
not work: an operation that has begun, and finds all that it needs in the rings, succeeds in spite of any failure or new
view in the meantime. So what one member has completed, all members complete that had begun it and are still alive.

`ReadValidation`: a member that fails may change its tensors while others still read them. So each member has a *fence*,
a counter in shared memory that it raises before it reports a failure. A member that has read a peer's tensor checks the
peer's fence afterwards, and discards the result if the fence was raised. No wrong number can result from a failure.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from elastrain.comm.errors import Aborted, CommError, Timeout
from elastrain.comm.groups.members import FrameKind, only_tensor, send
from elastrain.comm.groups.rings import Rings, SharedHost
from elastrain.comm.groups.works import OperationRequest
from elastrain.comm.wire.addresses import Frame
from elastrain.comm.wire.frames import tensor_bytes
from elastrain.comm.wire.mesh import Mesh

Found = TypeVar("Found")


class RingWaits:
    """The waits of a group in one generation. One thread at a time uses this.

    This object is in the set `waiting` while it waits; a thread that changes what it waits for must then ring the
    alarm. The communicator sets `error`, which ends all waits in this generation. Nothing here refers to the
    `GroupGeneration`: with such a cycle, only the garbage collector would free the memory of dead members.
    """

    def __init__(self, host: SharedHost, rings: Rings, waiting: set[RingWaits]) -> None:
        self.error: CommError | None = None
        self.description = ""  # what is waited for, in error messages
        self._host, self._rings, self._waiting = host, rings, waiting
        self._deadline_s = self._timeout_s = 0.0

    def start(self, request: OperationRequest, description: str) -> None:
        """Set deadline and description for the waits of a request. The request, with its tensors, is not kept."""
        self._deadline_s, self._timeout_s = request.deadline_s, request.timeout_s
        self.description = description

    def wait(
        self, look: Callable[[], Found | None], member: str, address: int | None = None, *, by_link: bool = False
    ) -> Found:
        """Return the result of `look`, as soon as it is not None.

        `look` is called again when the word at `address` changes, when `member` begins a generation, or when the alarm
        rings. Raises MemberLost, Aborted, Timeout.

        Args:
            look: Function that returns the awaited value, or None.
            member: The member that is waited for.
            address: Address of a futex word of that member.
            by_link: The value comes over the member's link, in order with its messages, not through its ring.
        """
        found = look()
        if found is not None:
            return found
        self._waiting.add(self)
        try:
            while found is None:
                # The alarm's count is read first: a later change rings the alarm, and the wait returns at once.
                alarm, words = self._host.alarm.count, self._words(member, address)
                found = look()
                if found is not None:
                    break
                error = self._why_not(member, by_link=by_link)
                if error is None:
                    self._host.alarm.wait(alarm, words, self._deadline_s)
                found = look()  # also with an error, because the value may have arrived in the meantime
                if found is None and error is not None:
                    raise error
            return found
        finally:
            self._waiting.discard(self)

    def _words(self, member: str, address: int | None) -> list[tuple[int, int]]:
        buffer = self._rings.find(member)
        addresses = [] if buffer is None else [buffer.begun_address]
        if address is not None:
            addresses.append(address)
        return [(one, ctypes.c_uint32.from_address(one).value) for one in addresses]

    def _why_not(self, member: str, *, by_link: bool) -> CommError | None:
        """Return the error if waiting for this member is pointless, else None.

        With `by_link`, the value comes in order with the member's messages. It may then be on its way although the
        member's ring is ahead, or although something else has failed here.
        """
        if self.error is not None and not (by_link and self._host.is_linked(member)):
            return self.error
        gone = self._host.why_gone(member)
        if gone is not None:
            return gone
        buffer = None if by_link else self._rings.find(member)
        # A member with rings writes the new generation into them only after it has finished with this one.
        ahead = self._host.is_ahead(member) if buffer is None else buffer.newest > self._rings.generation
        if ahead:
            return Aborted(f"{member!r} went on to a newer view")
        if time.monotonic() >= self._deadline_s:
            silent = self._rings.absent()
            missing = tuple(silent) if member in silent else (*silent, member)
            words = f"{self.description}: nothing from {', '.join(missing)} within {self._timeout_s} s"
            return Timeout(words, missing=missing)
        return None


class ReadValidation:
    """Fence of this member, and the fences that other members have shown to it. Used by the communicator's thread."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._mine = mesh.memory.empty(1, torch.int64)
        self._count = tensor_bytes(self._mine).cast("q")  # the same memory: access through torch is slow
        self._others: dict[str, torch.Tensor] = {}
        self._told: set[str] = set()  # members that were shown this member's fence in this generation

    def renew(self, members: Sequence[str]) -> None:
        """Begin a generation. A member keeps its fence for its whole life."""
        self._others = {member: fence for member, fence in self._others.items() if member in members}
        self._told.clear()

    @property
    def mine(self) -> int:
        """The count of this member's fence. Every message that is read in place carries it."""
        return self._count[0]

    def raise_mine(self) -> None:
        """Raise this member's fence. Call this before memory changes that peers may still read."""
        self._count[0] += 1

    def show(self, member: str) -> None:
        """Show this member's fence to `member`, once per view, before any message that is read in place."""
        if member != self._mesh.me and member not in self._told:
            self._told.add(member)
            send(self._mesh, member, FrameKind.FENCE, b"", (self._mine,))

    def hear(self, frame: Frame) -> None:
        """Take note of the sender's fence. Raises ProtocolError."""
        self._others[frame.source] = only_tensor(frame, dtype=torch.int64, numel=1)

    def was_raised(self, member: str, fence: int) -> bool:
        """Return True if the member has raised its fence since it sent the message with this count.

        Its tensor may then have changed while it was read, so the operation cannot succeed. It waits for the member's
        report of the failure, for its death, or for the next view.
        """
        view = self._others.get(member)
        return view is None or int(view[0].item()) != fence
