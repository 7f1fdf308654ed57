"""Fences: how a member finds out that a tensor may have changed while it was read.

A member that fails may change its tensors while others still read them. So each member has a *fence*, a counter in
shared memory that it raises before it reports a failure; whoever has read a member's tensor looks at the fence
afterwards, and throws the result away if it was raised meanwhile. No wrong number comes out of a failure.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastrain.comm.groups.kinds import FrameKind, only_tensor, send
from elastrain.comm.wire.frames import tensor_bytes
from elastrain.comm.wire.mesh import Mesh
from elastrain.comm.wire.values import Frame


class Fences:
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
