"""Publishes to shadows: sent behind all publishes that members wait for, at the pace of copies to new holders.

The rules of moves are in `pipeline/moves.py`. A primary sends a shard in pieces, until the step's vote. What a shadow
has not read when it votes is void, because the primary changes its memory after the commit. Shards whose primary the
shadow will be are not sent: it has a copy of their state.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from elastrain import protocol as p
from elastrain.job.values import Shape
from elastrain.member.contract import MemberPart, handles
from elastrain.member.pipeline.replicas import Replicas
from elastrain.member.state.ballot import Ballot, Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.member_views import Views
from elastrain.pipeline.moves import shadows
from elastrain.protocol.move_messages import ShadowPiece

PIECE_BYTES = 1 << 20
"""Most bytes of a piece. A link is one queue, and no boundary tensor may stand behind a whole block."""


class ShadowFeed(MemberPart):
    """Part that owns the pieces that this primary has to send, and the shards that this shadow has received."""

    def __init__(
        self, shape: Shape, views: Views, commit: Commit, replicas: Replicas, ballot: Ballot, out: Commands
    ) -> None:
        self.sent_bytes = 0
        """Bytes of parameters sent so far."""
        self._shape, self._views, self._commit = shape, views, commit
        self._replicas, self._ballot, self._out = replicas, ballot, out
        self._due: deque[tuple[str, ShadowPiece]] = deque()
        self._read = Counter[int]()
        """Shard -> pieces of the committed step that were read here."""

    def begin(self, step: int) -> None:
        """Forget all pieces: the parameters have another version now."""
        self._due.clear()
        self._read.clear()

    def forget_view(self) -> None:
        """Send no more pieces in this step: their receivers may be lost."""
        self._due.clear()

    # ---------------------------------------------------------------------------------------------------- the primary

    def feed(self, mine: Iterable[int]) -> None:
        """Plan the pieces of the shards that this primary has updated, after it has published them."""
        coming = self._commit.roles.coming
        lacking = {member: self._replicas.shadow_shards(member) for member in self._views.others}
        for shard in mine:
            count = _pieces(self._shape.shards[shard].size_bytes)
            for member in [m for m in lacking if shard in lacking[m] and coming.get(shard) != m]:
                step = self._commit.step
                self._due += [(member, ShadowPiece(step=step, shard=shard, part=(i, count))) for i in range(count)]

    def is_waiting(self) -> bool:
        """Return True if a piece could be sent."""
        return bool(self._due)

    def send(self, parameters_bytes: int) -> None:
        """Send pieces until `parameters_bytes` are reached."""
        sent_bytes = 0
        while self._due and sent_bytes < parameters_bytes:
            member, piece = self._due.popleft()
            self._out.send(member, piece)
            sent_bytes += self._shape.shards[piece.shard].size_bytes // piece.part[1]
        self.sent_bytes += sent_bytes

    # ----------------------------------------------------------------------------------------------------- the shadow

    @handles(ShadowPiece)
    def on_piece(self, message: ShadowPiece, payload: object) -> None:
        """Read a piece of the committed step, unless this member has voted: its sender may change it from then on."""
        is_wanted = message.shard in self._replicas.shadow_shards(self._views.me)
        if message.step != self._commit.step or self._ballot.has_voted or not is_wanted:
            return
        self._replicas.allocate_shadows()
        step, shard = message.step, message.shard
        self._out.do(p.TakeParameters(step=step, shard=shard, payload=payload, index=0, part=message.part))
        self._read[shard] += 1

    def is_ready(self) -> bool:
        """Return True if this member is a shadow, and holds all parameters of the committed step that it lacked.

        What it holds of shards whose primary it will be, their present primaries know.
        """
        plan, me, coming = self._commit.plan, self._views.me, self._commit.roles.coming
        if plan is None or me not in shadows(plan):
            return False
        # A copy of the state replaces the pieces: its holder makes the parameters of the next step itself.
        lacking = [shard for shard in self._replicas.shadow_shards(me) if coming.get(shard) != me]
        return all(self._read[shard] == _pieces(self._shape.shards[shard].size_bytes) for shard in lacking)


def _pieces(size_bytes: int) -> int:
    return max(1, -(-size_bytes // PIECE_BYTES))
