"""The batches of an evaluation that this member computes, or of which it computes some blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from elastrain import protocol as p
from elastrain.pipeline.forward_chains import ChainStage
from elastrain.pipeline.pipeline_plan import BoundaryName
from elastrain.protocol.evaluation_messages import EvaluateBatches, EvaluationName, boundary_name


@dataclass(frozen=True)
class BatchPiece:
    """A batch, or the forward of a batch through a stage of its chain."""

    batch: int
    stage: ChainStage | None = None
    """None: the whole batch."""
    then: str = ""
    """The member of the next stage; "" if this one has the figures."""


@dataclass(kw_only=True)
class OwnEvaluation:
    """The evaluation that this member's loop is in."""

    begun: p.EvaluationBegun
    is_announced: bool = False
    """True if the members of this view know it."""
    pieces: deque[BatchPiece] = field(default_factory=deque)
    computing: BatchPiece | None = None
    is_void: bool = False
    """True if what the loop computes now does not count."""
    done: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Batch -> figures, and the reason if it failed."""
    kept: set[BoundaryName] = field(default_factory=set)
    """Boundary tensors of this view that this member has made or received."""
    stale: set[BoundaryName] = field(default_factory=set)
    """Boundary tensors of the last view. Members that are still in it may read them."""

    @property
    def name(self) -> EvaluationName:
        """The evaluation's name."""
        return self.begun.name

    def take_up(self, me: str, message: EvaluateBatches) -> tuple[BoundaryName, ...]:
        """Take batches to compute. Returns the names of what no member reads any more."""
        # A member may stand in a chain twice, if it has adopted blocks behind those of another member.
        stages = list(enumerate(message.chain))
        thens = [*(stage.member for stage in message.chain[1:]), ""]
        for batch in message.batches:
            mine = [BatchPiece(batch, stage, thens[at]) for at, stage in stages if stage.member == me]
            self.pieces.extend(mine if message.chain else [BatchPiece(batch)])
        return self.drop(message.over)

    def announce(self) -> p.EvaluationBegun:
        """Note that the members of this view are told of the evaluation. Returns what the loop has said of it."""
        self.is_announced = True
        return self.begun

    def finish(self, batch: int, figures: str, problem: str) -> None:
        """Keep the figures of a batch, or the reason why it failed."""
        # Also once the collector has them: it may be lost, and another one asks all members what they have computed.
        self.done[batch] = figures, problem

    def receive(self, name: BoundaryName) -> tuple[BoundaryName, ...]:
        """Note that boundary tensors are coming in. Returns their name if those of the last view are to be dropped."""
        was_stale = name in self.stale
        self.stale.discard(name)
        self.kept.add(name)
        return (name,) if was_stale else ()

    def drop(self, batches: Collection[int] | None = None) -> tuple[BoundaryName, ...]:
        """Forget the boundary tensors of these batches, or of all. Returns their names."""
        gone = tuple(name for name in sorted(self.kept) if batches is None or -1 - name.micro_batch in batches)
        self.kept.difference_update(gone)
        return gone

    def next_piece(self) -> BatchPiece | None:
        """Take the first piece whose input is here, or return None."""
        # In the order in which they were handed out, so that a stage passes batches on as evenly as they come.
        for piece in self.pieces:
            begin = piece.stage.begin if piece.stage is not None else 0
            if not begin or boundary_name(self.name, piece.batch, begin) in self.kept:
                self.pieces.remove(piece)
                self.computing = piece
                return piece
        return None

    def take(self, event: p.BatchEvaluated) -> BatchPiece | None:
        """Return the piece that the loop has computed, or None if it does not count."""
        # It is the one that was given last: the loop computes one at a time.
        piece, self.computing = self.computing, None
        # Void is the one computation only that was under way: the next one begins with what counts.
        was_void, self.is_void = self.is_void, False
        if was_void:
            return None
        if event.made is not None:
            self.kept.add(event.made.name)
        return piece

    def begin_view(self) -> None:
        """Begin anew to ask for batches: the collector may be another one."""
        self.is_announced = False
        self.pieces.clear()
        # A stage reads memory of members that use it again once all are in the new view.
        self.is_void |= self.computing is not None and self.computing.stage is not None
        self.stale |= self.kept
        self.kept.clear()

    def resume(self) -> tuple[BoundaryName, ...]:
        """Forget what is of the last view, since all members are in this one. Returns the names."""
        gone, self.stale = tuple(sorted(self.stale)), set()
        return gone

    def void(self) -> None:
        """Forget all figures: they were computed with wrong parameters."""
        self.done.clear()
        self.is_void = self.computing is not None
