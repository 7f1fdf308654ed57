"""How a member waits for what others show in shared memory: asleep, until a word of theirs changes or an alarm rings.

An error of the communicator ends waiting, not work: an operation that has begun and finds everything that it needs in
the rings ends well, whatever has failed and whichever views have come meanwhile. So what one member has completed, all
complete that had begun it and are still there.

ReadValidation: how a member finds out that a tensor may have changed while it was read.

A member that fails may change its tensors while others still read them. So each member has a *fence*, a counter in
shared memory that it raises before it reports a failure; whoever has read a member's tensor looks at the fence
afterwards, and throws the result away if it was raised meanwhile. No wrong number comes out of a failure.
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
    """The waits of a group in one generation, by one thread at a time.

    `waiting` holds this while it waits: whoever changes what it waits for rings the alarm then. `error`: set by the
    communicator, the end of all waiting in this generation. Nothing here refers back to the generation: in a cycle, the
    memory of the dead would be let go of by the garbage collector only.
    """

    def __init__(self, host: SharedHost, rings: Rings, waiting: set[RingWaits]) -> None:
        self.error: CommError | None = None
        self.description = ""  # of what is waited for, in messages
        self._host, self._rings, self._waiting = host, rings, waiting
        self._deadline_s = self._timeout_s = 0.0

    def start(self, request: OperationRequest, description: str) -> None:
        """Begin the waits of this request, which is not kept: it refers to its caller's tensors."""
        self._deadline_s, self._timeout_s = request.deadline_s, request.timeout_s
        self.description = description

    def wait(
        self, look: Callable[[], Found | None], member: str, address: int | None = None, *, by_link: bool = False
    ) -> Found:
        """Return what `look` finds, as soon as it finds something.

        It is asked again when the word at `address` changes, the member begins a generation, or the alarm rings.
        Raises MemberLost, Aborted, Timeout.
        """
        found = look()
        if found is not None:
            return found
        self._waiting.add(self)
        try:
            while found is None:
                # In this order: what changes after the alarm was looked at rings it, and the wait returns at once.
                alarm, words = self._host.alarm.count, self._words(member, address)
                found = look()
                if found is not None:
                    break
                error = self._why_not(member, by_link=by_link)
                if error is None:
                    self._host.alarm.wait(alarm, words, self._deadline_s)
                found = look()  # with an error, too: it may have come in the end
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
        """Why it makes no sense to wait for this member; None: it does.

        `by_link`: for what comes in order with its messages. It may be on its way although the ring is ahead, and
        whatever has failed here meanwhile.
        """
        if self.error is not None and not (by_link and self._host.is_linked(member)):
            return self.error
        gone = self._host.why_gone(member)
        if gone is not None:
            return gone
        buffer = None if by_link else self._rings.find(member)
        # A member with rings names the new generation there when it has done with this one, and not before.
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
    """My fence, and those of others as far as they were shown. Used by the communicator's thread."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._mine = mesh.memory.empty(1, torch.int64)
        self._count = tensor_bytes(self._mine).cast("q")  # the same memory: torch's own ways to it take long
        self._others: dict[str, torch.Tensor] = {}
        self._told: set[str] = set()  # members that were shown mine in this generation

    def renew(self, members: Sequence[str]) -> None:
        """Begin a generation. A member's fence is the same for its whole life."""
        self._others = {member: fence for member, fence in self._others.items() if member in members}
        self._told.clear()

    @property
    def mine(self) -> int:
        """The count of my fence, which is sent with everything that is read in place."""
        return self._count[0]

    def raise_mine(self) -> None:
        """Raise my fence: called before memory changes that others may still read."""
        self._count[0] += 1

    def show(self, member: str) -> None:
        """Show mine, once per view, before anything that is read in place."""
        if member != self._mesh.me and member not in self._told:
            self._told.add(member)
            send(self._mesh, member, FrameKind.FENCE, b"", (self._mine,))

    def hear(self, frame: Frame) -> None:
        """Raises ProtocolError."""
        self._others[frame.source] = only_tensor(frame, dtype=torch.int64, numel=1)

    def was_raised(self, member: str, fence: int) -> bool:
        """Whether a member failed after it had sent what carries this fence.

        Its tensor may have changed while it was read: an operation cannot end well then, and waits for that member's
        word why, for its death, or for the next view.
        """
        view = self._others.get(member)
        return view is None or int(view[0].item()) != fence
