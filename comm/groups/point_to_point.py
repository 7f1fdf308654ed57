"""Tagged messages between two members of a group: copied when sent, matched in order with receives.

On one host the copy is read in place. The reader checks the sender's fence afterwards (see `waits.ReadValidation`),
because the memory of a message to a member that was removed from the view is reused.
"""

from __future__ import annotations

import math
import struct
import time
from dataclasses import dataclass

import torch

from elastrain.comm.collectives.devices import copy_back
from elastrain.comm.errors import Aborted, CommError, MemberLost, Timeout
from elastrain.comm.groups.communicator_failure import GroupFailures
from elastrain.comm.groups.members import Address, FrameKind, Mailbox, only_tensor, send, unpack
from elastrain.comm.groups.waits import ReadValidation
from elastrain.comm.groups.works import Work
from elastrain.comm.wire.addresses import Frame
from elastrain.comm.wire.mesh import Mesh
from elastrain.device import DeviceEvent, device_of

_BODY = struct.Struct("<Qqq")  # group, tag, the sender's fence


@dataclass(kw_only=True)
class PendingReceive:
    """A call that waits for a tagged message. `description`: what is missing, should nothing come in time.

    `submitted` is the event behind the caller's work on the device of `out`, or None for a tensor on the host.
    """

    work: Work
    out: torch.Tensor
    deadline_s: float
    description: str
    submitted: DeviceEvent | None = None


@dataclass(frozen=True, kw_only=True)
class _TaggedMessage:
    source: str
    fence: int
    tensor: torch.Tensor


class PointToPoint:
    """Tagged messages in both directions. Used by the communicator's thread."""

    def __init__(self, failures: GroupFailures, fences: ReadValidation, mesh: Mesh) -> None:
        self._failures, self._fences, self._mesh = failures, fences, mesh
        self._mailbox: Mailbox[_TaggedMessage, PendingReceive] = Mailbox()

    def post(self, work: Work, address: Address, to: str, tensor: torch.Tensor) -> None:
        """Send a tensor, which must not change any more, to a member of the group."""
        error = self._failures.error
        if error is None:
            self._fences.show(to)
            body = _BODY.pack(address.group, address.tag, self._fences.mine)
            send(self._mesh, to, FrameKind.MESSAGE, body, (tensor,))
        work.finish(error)

    def receive(self, address: Address, pending: PendingReceive) -> None:
        """Complete the receive with a message that has arrived, or keep it for a later one."""
        if self._failures.error is not None:
            pending.work.finish(self._failures.error)
            return
        found = self._mailbox.take(address, pending)
        if found is not None:
            self._hand_over(pending, found[1])

    def hear(self, frame: Frame) -> None:
        """Take a tagged message. Raises ProtocolError."""
        (group, tag, fence), _ = unpack(_BODY, frame)
        message = _TaggedMessage(source=frame.source, fence=fence, tensor=only_tensor(frame))
        if self._failures.error is not None:
            return
        pending = self._mailbox.put(Address(group=group, source=frame.source, tag=tag), message)
        if pending is not None:
            self._hand_over(pending, message)

    def _hand_over(self, pending: PendingReceive, message: _TaggedMessage) -> None:
        out, tensor = pending.out, message.tensor
        if (tensor.numel(), tensor.dtype) != (out.numel(), out.dtype):
            came = f"{tensor.dtype}[{tensor.numel()}] came from {message.source!r}"
            pending.work.finish(ValueError(f"{came}, {out.dtype}[{out.numel()}] was awaited"))
            return
        host = out if pending.submitted is None else device_of(out.device).empty_pinned(out.shape, out.dtype)
        host.copy_(tensor.view(out.shape))
        # One's own messages need no fence: they are not read while another process may change them.
        if message.source != self._mesh.me and self._fences.was_raised(message.source, message.fence):
            error = Aborted(f"{message.source!r} went on to a newer view while its message was read")
            pending.work.finish(error)
            self._failures.break_off(error)
            return
        if pending.submitted is not None:
            pending.work.landed.append(copy_back(host, out, pending.submitted))
        pending.work.source = message.source
        pending.work.finish()

    def next_deadline_s(self) -> float:
        """Return the time.monotonic() at which a receive becomes overdue; inf without receives."""
        receives = self._mailbox.receives
        return min([pending.deadline_s for _, pending in receives]) if receives else math.inf

    def overdue(self) -> Timeout | MemberLost | None:
        """Return the error of a receive that is overdue or whose sender is gone, else None."""
        now_s = time.monotonic()
        for address, pending in self._mailbox.receives:
            gone = self._failures.why_gone(address.source)
            if gone is not None:
                return gone
            if pending.deadline_s <= now_s:
                return Timeout(pending.description)
        return None

    def end(self, error: CommError) -> None:
        """Fail whatever is awaited."""
        for pending in self._mailbox.clear():
            pending.work.finish(error)
