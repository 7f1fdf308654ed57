"""Publishes to shadows: sent behind all publishes that members wait for, at the pace of copies to new holders.

The rules of moves are in `pipeline/moves.py`. A primary sends a shard in pieces, until the step's vote. What a shadow
has not read when it votes is void, because the primary changes its memory after the commit. Shards whose primary the
shadow will be are not sent: it has a copy of their state.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable

from elastrain import protocol as p
from elastrain.job.pieces import parameter_pieces
from elastrain.job.values import Shape
from elastrain.member.contract import MemberPart, handles
from elastrain.member.pipeline.replicas import Replicas
from elastrain.member.state.ballot import Ballot, Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.member_views import Views
from elastrain.pipeline.moves import shadows
from elastrain.protocol.move_messages import ShadowPiece


class ShadowFeed(MemberPart):
    """Part that owns the pieces that this primary has to send, and the shards that this shadow has received."""

    def __init__(
        self, shape: Shape, views: Views, commit: Commit, replicas: Replicas, ballot: Ballot, out: Commands
    ) -> None:
        self.sent_bytes = 0
        """Bytes of parameters sent so far."""
        self._shape, self._views, self._commit = shape, views, commit
        self._replicas, self._ballot, self._out = replicas, ballot, out
        self._due: dict[str, deque[ShadowPiece]] = {}
        """Shadow -> pieces that are still to be sent to it. No deque is empty."""
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
            count = parameter_pieces(self._shape.shards[shard].size_bytes)
            for member in [m for m in lacking if shard in lacking[m] and coming.get(shard) != m]:
                step = self._commit.step
                pieces = [ShadowPiece(step=step, shard=shard, part=(number, count)) for number in range(count)]
                self._due.setdefault(member, deque()).extend(pieces)

    def takers(self) -> set[str]:
        """Return the members to which a piece could be sent."""
        return set(self._due)

    def send(self, parameters_bytes: int, busy: Collection[str] = ()) -> None:
        """Send pieces to members that are not `busy`, until `parameters_bytes` are reached."""
        sent_bytes = 0
        while sent_bytes < parameters_bytes and (free := [member for member in self._due if member not in busy]):
            pieces = self._due.pop(free[0])
            piece = pieces.popleft()
            self._out.send(free[0], piece)
            # At the end of the dictionary, so that shadows get pieces in turn.
            self._due |= {free[0]: pieces} if pieces else {}
            sent_bytes += max(1, self._shape.shards[piece.shard].size_bytes // piece.part[1])
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
        if self._read[shard] == message.part[1]:
            # A recovery of this step that lets this member adopt the block has nothing to publish to it.
            self._commit.parameters.have(shard)

    def is_ready(self) -> bool:
        """Return True if this member is a shadow, and holds all parameters of the committed step that it lacked.

        What it holds of shards whose primary it will be, their present primaries know.
        """
        plan, me, coming = self._commit.plan, self._views.me, self._commit.roles.coming
        if plan is None or me not in shadows(plan):
            return False
        # A copy of the state replaces the pieces: its holder makes the parameters of the next step itself.
        shards = self._replicas.shadow_shards(me, among=shadows(plan)[me])
        lacking = [shard for shard in shards if coming.get(shard) != me]
        return all(self._read[shard] == parameter_pieces(self._shape.shards[shard].size_bytes) for shard in lacking)
