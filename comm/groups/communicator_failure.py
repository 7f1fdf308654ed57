"""Failure of a communicator: a failure of one operation ends everything in all groups, on all members.

Nothing works again before the next edit of the view. So all members see the same failure.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from elastrain.comm.errors import Aborted, CommError, MemberLost, Timeout
from elastrain.comm.groups.members import FrameKind, unpack
from elastrain.comm.wire.addresses import Frame, LossCause, PeerLost
from elastrain.comm.wire.mesh import Mesh

_ABORT_BODY = struct.Struct("<HB")  # length of the lost member's id (0: no member is lost), flags; id and reason follow
_PROVEN = 1  # flag: the member's process has ended
_TOLD_ALL = 2  # flag: the sender has told all members; without it each receiver forwards the report


class GroupFailures:
    """The failure of a communicator, and the lost members. One thread at a time uses this.

    `error`: the cause of the failure, until the next edit; None without a failure. `lost`: lost members of the view,
    and the cause. `end`: function that ends all operations with an error.
    """

    def __init__(self, mesh: Mesh, end: Callable[[CommError], None]) -> None:
        self.error: CommError | None = None
        self.lost: dict[str, LossCause] = {}
        self._mesh, self._end = mesh, end

    def renew(self) -> None:
        """Begin a generation: operations work again."""
        self.error = None
        self.lost = {}

    def lose(self, lost: PeerLost) -> None:
        """Note the loss of a member. It fails everything, unless the member left in good order or was never reached."""
        self.lost[lost.member] = lost.cause
        if lost.cause not in (LossCause.LEFT, LossCause.UNREACHED):
            self.break_off(MemberLost(lost.member, lost.reason))

    def why_gone(self, member: str | None) -> MemberLost | None:
        """Return the error for waiting for a member that left or was not reached, else None."""
        cause = self.lost.get(member or "")
        if cause is LossCause.LEFT:
            return MemberLost(member or "", "it left")
        return MemberLost(member or "", "it could not be reached") if cause is LossCause.UNREACHED else None

    def hear_abort(self, frame: Frame) -> None:
        """Fail because another member reports a failure, and forward the report. Raises ProtocolError."""
        (id_bytes, flags), text = unpack(_ABORT_BODY, frame)
        member, reason = text[:id_bytes].decode(errors="replace"), text[id_bytes:].decode(errors="replace")
        if member and self.lost.get(member) is not LossCause.LEFT:
            self.lost[member] = self._cause(member, proven=bool(flags & _PROVEN))
        if self.error is None:
            self.fail(MemberLost(member, reason) if member else Aborted(reason))
            if not flags & _TOLD_ALL:
                self._mesh.broadcast(FrameKind.ABORT, frame.body)

    def _cause(self, member: str, *, proven: bool) -> LossCause:
        known = self.lost.get(member)
        if proven:
            return LossCause.DEAD
        return LossCause.BROKEN if known in (None, LossCause.UNREACHED) else known

    def break_off(self, error: MemberLost | Aborted | Timeout) -> None:
        """Fail everything here, and report it to the other members. Does nothing after an earlier failure."""
        if self.error is not None:
            return
        lost = error.member.encode() if isinstance(error, MemberLost) else b""
        proven = isinstance(error, MemberLost) and self.lost.get(error.member) is LossCause.DEAD
        reason = str(error) if isinstance(error, Timeout) else error.reason
        flags = _PROVEN * proven + _TOLD_ALL * self._mesh.links.complete
        body = _ABORT_BODY.pack(len(lost), flags) + lost + f"{reason} (told by {self._mesh.me!r})".encode()
        self.fail(error)
        self._mesh.broadcast(FrameKind.ABORT, body)

    def fail(self, error: CommError) -> None:
        """End all operations here, in all groups. The first error stays."""
        self.error = self.error or error
        self._end(error)
