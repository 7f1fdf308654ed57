"""Fails a communicator, and tells the others: a failure of one operation ends everything in all groups, everywhere.

Nothing works again before the next edit of the view: so all members come out of a failure alike.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from elastrain.comm.errors import Aborted, CommError, MemberLost, Timeout
from elastrain.comm.groups.members import FrameKind, unpack
from elastrain.comm.wire.addresses import Frame, LossCause, PeerLost
from elastrain.comm.wire.mesh import Mesh

_ABORT_BODY = struct.Struct("<HB")  # length of the lost member's id (0: none is lost), flags; id and reason follow
_PROVEN = 1  # that it has ended
_TOLD_ALL = 2  # by the first that tells; else whoever hears it hands it on


class GroupFailures:
    """`error`: what made everything fail until the next edit, None when all is well. `lost`: members of the view, and
    why. `end`: ends whatever is under way with an error, and tells its callers. By one thread at a time.
    """

    def __init__(self, mesh: Mesh, end: Callable[[CommError], None]) -> None:
        self.error: CommError | None = None
        self.lost: dict[str, LossCause] = {}
        self._mesh, self._end = mesh, end

    def renew(self) -> None:
        """A generation begins: what had failed works again."""
        self.error = None
        self.lost = {}

    def lose(self, lost: PeerLost) -> None:
        """The end of a member breaks everything off, unless it left in good order or was never reached."""
        self.lost[lost.member] = lost.cause
        if lost.cause not in (LossCause.LEFT, LossCause.UNREACHED):
            self.break_off(MemberLost(lost.member, lost.reason))

    def why_gone(self, member: str | None) -> MemberLost | None:
        """The error of waiting for a member whose end alone breaks nothing off."""
        cause = self.lost.get(member or "")
        if cause is LossCause.LEFT:
            return MemberLost(member or "", "it left")
        return MemberLost(member or "", "it could not be reached") if cause is LossCause.UNREACHED else None

    def hear_abort(self, frame: Frame) -> None:
        """Another member has broken everything off. Raises ProtocolError."""
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
        """Fail everything here, and tell the others."""
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
        """End everything here, in all groups."""
        self.error = self.error or error
        self._end(error)
