"""Commands that are work on gradients and states: the books carry them out (`elastrain/books/`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from elastrain.job.fold import Combine, Node
from elastrain.job.values import Record
from elastrain.protocol.messages import Boundary


@dataclass(frozen=True, kw_only=True)
class CombineOwn:
    """Add two of this member's partials of one block, in place in the left one."""

    step: int
    block: int
    combine: Combine


# As it came, and kept until the record: after a loss its maker may be gone, and somebody else may need it.


@dataclass(frozen=True, kw_only=True)
class TakeBoundary:
    """A boundary tensor has come that is not here yet: keep it until `EndAttempt` or `VoidAttempt` of its step."""

    message: Boundary
    payload: Any


# Kept where it lies, in its maker's memory: what is added to something else need not be copied first.


@dataclass(frozen=True, kw_only=True)
class Keep:
    """A partial enters the fold of a shard's lane: tensor `index` of the payload, or from this member's own block.

    Answer, if it is damaged: `PartialDamaged`.
    """

    step: int
    shard: int
    lane: int
    node: Node
    payload: Any
    index: int
    block: int
    maker: str
    """The member that has computed it."""


@dataclass(frozen=True, kw_only=True)
class CombineShard:
    """Add two partials in the fold of a shard's lane, at its primary. Answer, if one is damaged: `PartialDamaged`."""

    step: int
    shard: int
    lane: int
    combine: Combine


# Measured once, by the primary: a norm that each backup took for itself could differ in its last bits.


@dataclass(frozen=True, kw_only=True)
class FinishGradients:
    """Add the lanes of these shards in block order and measure them. Answer: `GradientsFinished`."""

    step: int
    shards: tuple[int, ...]


# Copied, because it must outlive its primary, in whose memory the payload lies.


@dataclass(frozen=True, kw_only=True)
class StoreGradients:
    """Copy the finished gradients of a payload, as a backup. Answer: `GradientsKept`."""

    step: int
    shards: tuple[int, ...]
    source: str
    payload: Any


# Beside everything else: what a checkpoint has of a large model takes long to read, and views change meanwhile.


@dataclass(frozen=True, kw_only=True)
class ReadInitial:
    """Read the stored initial state: of the whole model the parameters, of these shards everything.

    Answer: `InitialRead`.
    """

    shards: tuple[int, ...]


# By every holder for itself: nothing has to be sent, and before the first commit none can be lost.


@dataclass(frozen=True, kw_only=True)
class Create:
    """Make the initial optimizer state of these shards: as it was read, else from the model's parameters."""

    shards: tuple[int, ...]
    bound: tuple[int, ...]
    """Those whose state works on the model's own memory (this member is their primary)."""


# The model's own memory: what was updated is published from where it lies, and no copy has to be kept.


@dataclass(frozen=True, kw_only=True)
class Apply:
    """Update these shards as their primary; their state then works on the model's own memory."""

    record: Record
    shards: tuple[int, ...]
    touched: dict[int, tuple[int, ...]]


# In scratch: until its digest has matched the primary's, the state before it is what can be gone on from.


@dataclass(frozen=True, kw_only=True)
class ApplyBehind:
    """Update a backup's copy in scratch when there is time. Answer: `AppliedBehind`."""

    record: Record
    shard: int
    touched: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Swap:
    """The scratch of `step` is verified: it becomes the state, and the gradient is let go."""

    step: int
    shard: int


@dataclass(frozen=True, kw_only=True)
class Bind:
    """This member is now the shard's primary: its state, verified as of `step`, works on the model's own memory."""

    step: int
    shard: int


# The new primary publishes into the model's memory from now on, before this backup has made the update.


@dataclass(frozen=True, kw_only=True)
class Unbind:
    """No longer primary, still a holder: the state gets memory of its own."""

    shard: int


# The states stay as they are until then, so that a digest is of this step and of no later one.


@dataclass(frozen=True, kw_only=True)
class ComputeDigests:
    """Digest these states, and what was published of their parameters, when there is time. Answer: `StatesDigested`."""

    step: int
    shards: tuple[int, ...]
    published: tuple[int, ...]


# Counted, because an answer to an earlier one says nothing of what came into the model since.


@dataclass(frozen=True, kw_only=True)
class DigestParameters:
    """Digest all that the model computes with, when there is time. Answer: `ParametersDigested`."""

    turn: int
    needed: tuple[int, ...]
    """These shards, ascending; others may be absent."""


# At once: until it is known who is wrong, this member neither acknowledges nor votes, and all others wait.


@dataclass(frozen=True, kw_only=True)
class UpdateAgain:
    """Make the update of a backup's state again, into the same scratch, at once. Answer: `UpdatedAgain`."""

    record: Record
    shard: int
    touched: tuple[int, ...]


# In memory of its own: what this member has of the shard is what is in question.


@dataclass(frozen=True, kw_only=True)
class TryUpdate:
    """Make the update from the state and the gradient of the payload, which a backup sent. Answer: `UpdateTried`."""

    record: Record
    shard: int
    touched: tuple[int, ...]
    payload: Any
    asker: str


# As it is now, and not what was told before: memory that has changed since shows only that way.


@dataclass(frozen=True, kw_only=True)
class DigestAgain:
    """Digest a shard's state (or what the model has of its parameters) as it is now. Answer: `DigestedAgain`."""

    step: int
    shard: int
    parameters: bool
    asker: str


@dataclass(frozen=True, kw_only=True)
class TakeParameters:
    """Copy published parameters from `payload[index]` into the model."""

    step: int
    shard: int
    payload: Any
    index: int


# Looked at when it has arrived, because a copy that is damaged on its way would be a holder of wrong bits.


@dataclass(frozen=True, kw_only=True)
class TakeCopy:
    """Copy a shard's state from the payload. Answer: `TookCopy`."""

    step: int
    shard: int
    payload: Any
    source: str
    digest: int | None
    """What it should be; None: see the payload."""


@dataclass(frozen=True, kw_only=True)
class Drop:
    """No longer a holder of this shard."""

    shard: int


# Read later, when there is time: a state that is about to change before that is copied first, so that nobody waits.


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Take the states of these shards, which are as of `step` now, for the checkpoint of that step."""

    step: int
    shards: tuple[int, ...]
    digests: tuple[int | None, ...]
    """Of each, as far as it is known: what has changed until it is written is no state of that step."""


@dataclass(frozen=True, kw_only=True)
class DropCaptures:
    """The checkpoint of `step` is over: what was taken for it, and is not written, is let go."""

    step: int


# Only now: until the commit any of them may be needed again, by another primary.


@dataclass(frozen=True, kw_only=True)
class EndAttempt:
    """The step is committed: partials, folds and finished gradients of the attempt are let go."""

    step: int


# Its maker looks, because only it can tell memory that has changed from what was damaged on its way.


@dataclass(frozen=True, kw_only=True)
class CheckPartial:
    """Look whether this member's partial is still what it was when it was sent. Answer: `PartialChecked`."""

    step: int
    block: int
    node: Node


@dataclass(frozen=True, kw_only=True)
class CheckGradient:
    """Look whether a finished gradient that is kept is still what its primary had. If it is not: `GradientsKept`."""

    step: int
    shard: int


# By all members, when each has stopped reading what the others have.


@dataclass(frozen=True, kw_only=True)
class VoidAttempt:
    """The open step begins anew: its partials, folds and finished gradients count for nothing, here and elsewhere."""

    step: int


Work: TypeAlias = (
    CheckPartial
    | CheckGradient
    | VoidAttempt
    | CombineOwn
    | TakeBoundary
    | Keep
    | CombineShard
    | FinishGradients
    | StoreGradients
    | ReadInitial
    | Create
    | Apply
    | ApplyBehind
    | Swap
    | Bind
    | Unbind
    | ComputeDigests
    | DigestParameters
    | UpdateAgain
    | TryUpdate
    | DigestAgain
    | TakeParameters
    | TakeCopy
    | Capture
    | DropCaptures
    | Drop
    | EndAttempt
)
