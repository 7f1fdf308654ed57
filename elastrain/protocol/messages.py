"""Messages between members during a step: frozen values, and their encoding in a frame.

A message carries only decisions and names. Numbers (gradients, parameters, state) are sent with it as tensors, in the
order in which the message names their shards. `Report` and `Vote` are defined in values.py and sent as they are.
Nothing here decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, get_args

from elastrain.job.fold import Node
from elastrain.job.values import Contribution, Record, Report, Vote
from elastrain.pipeline.graph import BlockGraph, CrossingTensor
from elastrain.pipeline.pipeline_plan import BoundaryName, PipelinePlan
from elastrain.protocol.codec import BitMask, NumberedCodec
from elastrain.protocol.evaluation_messages import (
    BatchBoundary,
    BatchFigures,
    BlocksAdopted,
    EvaluateBatches,
    EvaluationResult,
    InEvaluation,
    OutsideEvaluation,
)
from elastrain.protocol.move_messages import ShadowPiece


# Only complete nodes of the sender's plan are sent: it first adds what it can add itself.
@dataclass(frozen=True, kw_only=True)
class Partial:
    """A node of the fold of one block, for the shards whose primary is the receiver."""

    step: int
    block: int
    node: Node
    contribution: Contribution
    touched: BitMask
    """Bit mask over the block's leaves that got a gradient."""
    # Optimizers treat a missing gradient and a zero one differently, so zeros in the tensor are not enough.
    lanes: tuple[tuple[int, int], ...]
    """(shard, lane) of each tensor."""


# Identified by name and not by maker: any member that makes it again makes the same bits, and a second copy is dropped.
@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Boundary tensors of one cut, micro-batch and direction. The tensors are sent with it, without the None ones."""

    name: BoundaryName
    tensors: tuple[CrossingTensor | None, ...]
    """In the order of the graph's crossings; None: this one got no gradient."""
    # Only the member with the loss knows it, and every block's fold needs it. So it is sent with the gradients.
    contribution: Contribution | None
    """Contribution of this micro-batch, sent with a gradient; None with activations."""


# With everything else that an update needs, because a backup must be able to make it without its primary.
@dataclass(frozen=True, kw_only=True)
class Gradient:
    """Finished gradients, from the primary to its backups."""

    step: int
    shards: tuple[int, ...]
    contribution: Contribution
    touched: tuple[tuple[BitMask, ...], ...]
    """Per shard and lane, the folded bit masks."""
    square_norms: tuple[float, ...]


# Both are needed to make the step. With them, the primary may be lost at once.
@dataclass(frozen=True, kw_only=True)
class Ack:
    """A confirmation: the backup keeps these gradients, and its state of `step - 1` is verified."""

    step: int
    shards: tuple[int, ...]


# With the record, so that a receiver passes the commit before it overwrites the parameters that it computed with.
@dataclass(frozen=True, kw_only=True)
class Publish:
    """New parameters. `record` is None only for the parameters that the job starts with (step -1)."""

    step: int
    record: Record | None
    shards: tuple[int, ...]


# Sent after the publish: taking digests costs time, for which no member has to wait.
@dataclass(frozen=True, kw_only=True)
class Digests:
    """Digests of a primary's shards after `step`, for other members to compare with theirs."""

    step: int
    digests: tuple[tuple[int, int], ...]
    """(shard, digest of its state), for backups."""
    parameters: tuple[tuple[int, int], ...]
    """(shard, digest of its parameters as published), for all members that compute with them."""


# The state of one step. The gradients of later steps follow on the same ordered link, so the copy never falls behind.
@dataclass(frozen=True, kw_only=True)
class ShardCopy:
    """A shard's whole state as of `step`, for a member that is to become a holder."""

    step: int
    shard: int
    digest: int | None
    """Digest of that state when it was last compared. None: the digest sent with the tensors counts."""
    part: tuple[int, int] = (0, 1)
    """The piece's number, and the number of pieces, which are sent in order. In pipelines there are several."""


# The sender does not change its state until this comes, because a copy refers to its memory.
@dataclass(frozen=True, kw_only=True)
class Copied:
    """A confirmation that the copy was taken, or an answer that it was not."""

    step: int
    shard: int
    intact: bool
    """True if its digest is the one that came with it."""
    refused: tuple[int, ...] = ()
    """Shards of which the receiver takes no copy, this one among them: it has no room for them as a backup."""


# Sent to all members, also to those that hold nothing, so that the number of answers to wait for is known.
@dataclass(frozen=True, kw_only=True)
class Doubt:
    """A request for the receiver's digest of the shard after `step`: the sender's differs from the primary's."""

    step: int
    shard: int
    parameters: bool
    """True: digest of the parameters as published. False: digest of the state."""


# Always sent, because the sender of the request judges when all members have answered.
@dataclass(frozen=True, kw_only=True)
class DigestReply:
    """The answer to a doubt or a trial. A digest of None: the sender has nothing to compare."""

    step: int
    shard: int
    parameters: bool
    digest: int | None
    is_trial: bool


# The last resort if there is no third copy: if two machines get the same result, both compute rightly.
@dataclass(frozen=True, kw_only=True)
class RepeatUpdate:
    """A backup's state before `step`, and its gradient.

    The primary makes the update again and answers with its digest.
    """

    step: int
    shard: int
    touched: tuple[BitMask, ...]
    """Per lane."""


# Sent to the maker, which alone can tell a change in its memory from damage on the way.
@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A notice that the receiver's partial has arrived damaged at the sender, for this `shard`."""

    step: int
    block: int
    node: Node
    shard: int


# Text and tensors, never objects: data of another process is not executed.
@dataclass(frozen=True, kw_only=True)
class LoopHandover:
    """State that a newcomer's loop needs to enter `step`: schedulers, registered objects. Tensors are sent with it."""

    step: int
    state: str


# Also sent by members that have written nothing: the collector tells them in turn that the checkpoint is over.
@dataclass(frozen=True, kw_only=True)
class PartReport:
    """The parts of a checkpoint that the sender has written. The receiver, the member of lowest rank, collects them."""

    step: int
    shards: tuple[int, ...]
    told: tuple[str, ...]
    """Per shard, its place and digest, in the text form of the snapshot package."""
    lacking: tuple[int, ...]
    """Shards that it was to write, but whose state of that step it no longer has."""
    problem: str
    """Reason why it cannot write at all; empty if it can."""


@dataclass(frozen=True, kw_only=True)
class WriteInstead:
    """A request to write these shards of the checkpoint of `step`, unless the receiver does so already."""

    step: int
    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointOver:
    """A notice that the checkpoint of `step` is complete (`reason` is empty), or was given up for this reason."""

    step: int
    reason: str
    told: str
    """With local disks: the manifest that each node keeps; see `ManifestWritten`."""


@dataclass(frozen=True, kw_only=True)
class EndsBefore:
    """A notice that the sender's training loop has ended before `step`."""

    step: int
    keeps_own: bool = False
    """True if it needs no more blocks, because its memory limit leaves no room for them."""
    is_checkpoint_wished: bool = False
    """True if the step before shall become a checkpoint, although its record does not say so."""


@dataclass(frozen=True, kw_only=True)
class TakeLast:
    """A decision that `step`, the last one, becomes a checkpoint. The wish for it came too late for a vote."""

    step: int


# Sent only after an `EndsBefore`: as long as all loops go on, no member has to say so.
@dataclass(frozen=True, kw_only=True)
class GoesOn:
    """A notice that the sender's training loop is in `step`, before which others have ended."""

    step: int


# Sent after every member's `EndsBefore`: until then a member may still need what another one has.
@dataclass(frozen=True, kw_only=True)
class HasAll:
    """A notice that the sender's loop has ended, and that it has all parameters after `step` that it is to have."""

    step: int


# Asked between two steps of the sender: without its vote no member can go on to the next state.
@dataclass(frozen=True, kw_only=True)
class FetchShard:
    """A question for a shard's whole state as of `step`, for the sender's script. Answer: `FetchedShard`."""

    step: int
    shard: int


@dataclass(frozen=True, kw_only=True)
class FetchedShard:
    """The shard's whole state as of `step`."""

    step: int
    shard: int
    digest: int | None
    """Digest of that state when it was last compared. None: the digest sent with the tensors counts."""


# Only before the first commit: later plans come with a record, and votes say what newcomers have traced.
@dataclass(frozen=True, kw_only=True)
class HasTraced:
    """A notice that the sender's tracing pass is over. It may get tasks of the job's first step."""

    graph: BlockGraph
    fewest: int = 1
    """With `--stages auto`: the fewest members per pipeline for which the sender has room."""


# A record has only the digest of a plan that stays. A newcomer, and a member that has missed a record, lack the plan.
@dataclass(frozen=True, kw_only=True)
class AskPlan:
    """A question for the plan in force, from a member that lacks it. Answer: `TellPlan`."""

    digest: str


@dataclass(frozen=True, kw_only=True)
class TellPlan:
    """The plan in force."""

    plan: PipelinePlan


Message: TypeAlias = (
    Report
    | Partial
    | Gradient
    | Ack
    | Vote
    | Publish
    | Digests
    | ShardCopy
    | Copied
    | Doubt
    | DigestReply
    | RepeatUpdate
    | Damaged
    | LoopHandover
    | PartReport
    | WriteInstead
    | CheckpointOver
    | EndsBefore
    | GoesOn
    | Boundary
    | HasAll
    | TakeLast
    | HasTraced
    | FetchShard
    | FetchedShard
    | AskPlan
    | TellPlan
    | ShadowPiece
    | InEvaluation
    | BatchBoundary
    | BlocksAdopted
    | EvaluateBatches
    | BatchFigures
    | EvaluationResult
    | OutsideEvaluation
)

# Numbered in the order of the union. Both ends have the same version, because the handshake compares versions.
KINDS: dict[type, int] = {kind: number for number, kind in enumerate(get_args(Message), start=1)}
"""Class of a message -> its number in a frame."""
_CODEC: NumberedCodec[Message] = NumberedCodec(KINDS)


def encode(message: Message) -> tuple[int, bytes]:
    """Return `(kind, body)`. Floats are read back exactly, including NaN and infinities."""
    return _CODEC.encode(message)


def decode(kind: int, body: bytes) -> Message:
    """Return the message: the inverse of `encode`. Raises BadMessageError, a ValueError, for other bytes."""
    return _CODEC.decode(kind, body)
