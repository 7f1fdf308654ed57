"""What members say to each other during a step: frozen values, and their form in a frame.

A message carries decisions and names only; numbers (gradients, parameters, state) travel beside it as tensors, in the
order in which the message names their shards. `Report` and `Vote` are sent as they are: what is decided over lives in
values.py. Nothing here decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, get_args

from elastrain.job.fold import Node
from elastrain.job.values import Contribution, Record, Report, Vote
from elastrain.pipeline.graph import BlockGraph, CrossingTensor
from elastrain.pipeline.pipeline_plan import BoundaryName
from elastrain.protocol.codec import BitMask, NumberedCodec


# Only complete nodes of the sender's plan travel: what it could still add to itself it adds first.
@dataclass(frozen=True, kw_only=True)
class Partial:
    """A node of the fold of one block, for the shards that the receiver answers for."""

    step: int
    block: int
    node: Node
    contribution: Contribution
    touched: BitMask
    """Bit mask over the block's leaves: which got a gradient at all."""
    # Optimizers treat a missing gradient and a zero one differently, so zeros in the tensor do not tell.
    lanes: tuple[tuple[int, int], ...]
    """(shard, lane) of each tensor."""


# By name and not by maker: whoever makes it again makes the same bits, and a second copy is dropped.
@dataclass(frozen=True, kw_only=True)
class Boundary:
    """What crosses one cut for one micro-batch in one direction; the tensors travel beside, without the None ones."""

    name: BoundaryName
    tensors: tuple[CrossingTensor | None, ...]
    """In the order of the graph's crossings; None: this one got no gradient."""
    # Only who has the loss knows it, and every block's fold needs it: it goes the way of the gradients.
    contribution: Contribution | None
    """Of this micro-batch, with a gradient; None with activations."""


# With all that an update needs besides: a backup must be able to make it without its primary.
@dataclass(frozen=True, kw_only=True)
class Gradient:
    """Finished gradients, from the primary to its backups."""

    step: int
    shards: tuple[int, ...]
    contribution: Contribution
    touched: tuple[tuple[BitMask, ...], ...]
    """Per shard and lane, the folded bit masks."""
    square_norms: tuple[float, ...]


# Both, because only from both it could make the step: then the primary may be lost at once.
@dataclass(frozen=True, kw_only=True)
class Ack:
    """The backup keeps these gradients, and its state of `step - 1` is verified."""

    step: int
    shards: tuple[int, ...]


# The record travels along: a receiver passes the commit before it overwrites what it computed with.
@dataclass(frozen=True, kw_only=True)
class Publish:
    """New parameters; `record` is None only for the parameters that the job starts with (step -1)."""

    step: int
    record: Record | None
    shards: tuple[int, ...]


# After the publish and not in it: taking digests costs time for which nobody has to wait.
@dataclass(frozen=True, kw_only=True)
class Digests:
    """What a primary's shards are worth after `step`, for others to compare with what they have."""

    step: int
    digests: tuple[tuple[int, int], ...]
    """(shard, digest of its state): for backups."""
    parameters: tuple[tuple[int, int], ...]
    """(shard, digest of its parameters as they were published): for all who compute with them."""


# As of one step; the gradients of later ones follow on the same ordered link, so that it never falls behind.
@dataclass(frozen=True, kw_only=True)
class ShardCopy:
    """A shard's whole state as of `step`, for a member that is to become a holder."""

    step: int
    shard: int
    digest: int | None
    """Of that state when it was last compared; None: the one that comes with the tensors has to do."""


# The sender's state stays as it is until this comes: a copy refers to its memory.
@dataclass(frozen=True, kw_only=True)
class Copied:
    """The copy was taken; `intact` says whether its digest is the one that came with it."""

    step: int
    shard: int
    intact: bool


# Asked of all members, also of those that hold nothing: so the number of answers to wait for is known.
@dataclass(frozen=True, kw_only=True)
class Doubt:
    """The sender has something else than the shard's primary told: what has the receiver, now, after `step`?"""

    step: int
    shard: int
    parameters: bool
    """Of the parameters as published, else of the state."""


# Sent in any case: the asker judges when all have answered, and must not wait for those that have nothing.
@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The answer to a doubt, or to a trial; None: the sender has nothing to compare."""

    step: int
    shard: int
    parameters: bool
    digest: int | None
    is_trial: bool


# The last resort where there is no third copy: of two machines that make the same of it, both compute rightly.
@dataclass(frozen=True, kw_only=True)
class Trial:
    """A backup's state before `step`, and its gradient: the primary is to make the update again and tell the digest."""

    step: int
    shard: int
    touched: tuple[BitMask, ...]
    """Per lane."""


# To its maker, which alone can tell whether its memory has changed or the way there is bad.
@dataclass(frozen=True, kw_only=True)
class Damaged:
    """What has come of the receiver's partial, for the sender's `shard`, is not what the receiver had."""

    step: int
    block: int
    node: Node
    shard: int


# Text and tensors, never objects: what comes from another process is not executed.
@dataclass(frozen=True, kw_only=True)
class LoopHandover:
    """What a newcomer's training loop needs to enter `step`: schedulers, registered objects. Tensors travel beside."""

    step: int
    state: str


# Also by members that have written nothing: who collects the parts tells them in turn that the checkpoint is over.
@dataclass(frozen=True, kw_only=True)
class PartReport:
    """What the sender has written of the checkpoint of `step`, for the member of lowest rank, which collects it."""

    step: int
    shards: tuple[int, ...]
    told: tuple[str, ...]
    """Per shard, where it lies and its digest, as the room of snapshots writes and reads it."""
    lacking: tuple[int, ...]
    """Shards that it was to write, and whose state of that step it has no more."""
    problem: str
    """Why it cannot write at all; empty: it can."""


@dataclass(frozen=True, kw_only=True)
class WriteInstead:
    """Write these shards of the checkpoint of `step`, if the receiver does not do so already."""

    step: int
    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointOver:
    """The checkpoint of `step` is complete, or is given up for this reason."""

    step: int
    reason: str
    told: str
    """Where disks are local: what each of them is to keep of it; see `ManifestWritten`."""


@dataclass(frozen=True, kw_only=True)
class EndsBefore:
    """The training loop of this member has ended before `step`."""

    step: int
    keeps_own: bool = False
    """It is sent no more blocks, because its memory limit leaves no room for them."""
    is_checkpoint_wished: bool = False
    """The step before is to become a checkpoint, though its record does not say so."""


@dataclass(frozen=True, kw_only=True)
class TakeLast:
    """All loops have ended, and a member asked for a checkpoint too late for a vote: `step`, the last, becomes one."""

    step: int


# Said only then: as long as all go on, nobody has to say so.
@dataclass(frozen=True, kw_only=True)
class GoesOn:
    """The training loop of this member is in `step`, before which others have ended."""

    step: int


# After everybody's `EndsBefore`: until then somebody may still need what another member has.
@dataclass(frozen=True, kw_only=True)
class HasAll:
    """The sender's loop has ended, and it has the parameters after `step` of every block that it is to have."""

    step: int


# Said before the first commit only: later plans come with a record, and votes tell what newcomers have traced.
@dataclass(frozen=True, kw_only=True)
class HasTraced:
    """The sender's tracing pass is over: it may be given tasks of the job's first step."""

    graph: BlockGraph


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
    | Evidence
    | Trial
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
)

# Numbered in the order of the union: both ends have the same version, which the handshake of the job compares.
KINDS: dict[type, int] = {kind: number for number, kind in enumerate(get_args(Message), start=1)}
"""Class of a message -> the number that stands for it in a frame."""
_CODEC: NumberedCodec[Message] = NumberedCodec(KINDS)


def encode(message: Message) -> tuple[int, bytes]:
    """`(kind, body)`. Floats are written so that they read back exactly, NaN and infinities too."""
    return _CODEC.encode(message)


def decode(kind: int, body: bytes) -> Message:
    """Inverse of `encode`. Raises BadMessageError, a ValueError, on anything that is not such a message."""
    return _CODEC.decode(kind, body)
