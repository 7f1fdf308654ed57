"""Commands that are work on gradients and states. `BufferBook` carries them out (`elastrain/buffers/`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from elastrain.job.fold import Combine, Node
from elastrain.job.values import Record
from elastrain.protocol.loop_commands import DropBoundaries
from elastrain.protocol.messages import Boundary


@dataclass(frozen=True, kw_only=True)
class CombineOwn:
    """Add two of this member's partials of one block, in place in the left one."""

    step: int
    block: int
    combine: Combine


# Kept unchanged until the record: after a loss its maker may be gone, and another member may need it.


@dataclass(frozen=True, kw_only=True)
class TakeBoundary:
    """Keep a boundary tensor that has arrived, until `EndAttempt` or `VoidAttempt` of its step."""

    message: Boundary
    payload: Any


# Used in its maker's memory: a tensor that is only added to another one need not be copied first.


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Enter a partial into the fold of a shard's lane: tensor `index` of the payload, or this member's own block.

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
    """The member that computed it."""


@dataclass(frozen=True, kw_only=True)
class CombineShard:
    """Add two partials in the fold of a shard's lane, at its primary. Answer, if one is damaged: `PartialDamaged`."""

    step: int
    shard: int
    lane: int
    combine: Combine


# Measured once, by the primary: norms that each backup measured itself could differ in the last bits.


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


# In the background: a large model's checkpoint takes long to read, and views change meanwhile.


@dataclass(frozen=True, kw_only=True)
class ReadInitial:
    """Read the stored initial state: parameters of the whole model, and the full state of these shards.

    Answer: `InitialRead`.
    """

    shards: tuple[int, ...]


# Every holder does it by itself: nothing has to be sent, and before the first commit no state can be lost.


@dataclass(frozen=True, kw_only=True)
class Create:
    """Make the initial optimizer state of these shards: as it was read, else from the model's parameters."""

    shards: tuple[int, ...]
    bound: tuple[int, ...]
    """Shards whose state uses the model's own memory, because this member is their primary."""


# The model's own memory: updated parameters are published from there, without another copy.


@dataclass(frozen=True, kw_only=True)
class Apply:
    """Update these shards as their primary. Their state then uses the model's own memory."""

    record: Record
    shards: tuple[int, ...]
    touched: dict[int, tuple[int, ...]]


# In scratch: the state before it is needed until the digest has matched the primary's.


@dataclass(frozen=True, kw_only=True)
class ApplyBehind:
    """Update a backup's copy in scratch, in the background. Answer: `AppliedBehind`."""

    record: Record
    shard: int
    touched: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Swap:
    """Replace the state by the scratch of `step`, which is verified, and free the gradient."""

    step: int
    shard: int


@dataclass(frozen=True, kw_only=True)
class Bind:
    """Move the shard's state, verified as of `step`, to the model's own memory: this member is now its primary."""

    step: int
    shard: int


# The new primary publishes into the model's memory, perhaps before this backup has made the update.


@dataclass(frozen=True, kw_only=True)
class Unbind:
    """Move the state to memory of its own: this member is no longer primary, but still a holder."""

    shard: int


# The states do not change until then, so that the digests belong to this step.


@dataclass(frozen=True, kw_only=True)
class ComputeDigests:
    """Digest these states, and their published parameters, in the background. Answer: `StatesDigested`."""

    step: int
    shards: tuple[int, ...]
    published: tuple[int, ...]


# Counted, because an answer to an earlier command does not cover parameters that came since.


@dataclass(frozen=True, kw_only=True)
class DigestParameters:
    """Digest all parameters that the model computes with, in the background. Answer: `ParametersDigested`."""

    turn: int
    needed: tuple[int, ...]
    """Shards to digest, ascending; others may be absent."""


# At once: until the wrong side is known, this member neither acknowledges nor votes, and all others wait.


@dataclass(frozen=True, kw_only=True)
class UpdateAgain:
    """Make the update of a backup's state again, into the same scratch, at once. Answer: `UpdatedAgain`."""

    record: Record
    shard: int
    touched: tuple[int, ...]


# In separate memory, because this member's own copy of the shard is in question.


@dataclass(frozen=True, kw_only=True)
class TryUpdate:
    """Make the update from the state and the gradient of the payload, which a backup sent. Answer: `UpdateTried`."""

    record: Record
    shard: int
    touched: tuple[int, ...]
    payload: Any
    asker: str


# The present content and not the reported digest: only so a change in memory can be found.


@dataclass(frozen=True, kw_only=True)
class DigestAgain:
    """Digest a shard's present state (or its parameters in the model). Answer: `DigestedAgain`."""

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
    part: tuple[int, int] | None = None
    """Number of a piece and number of pieces, for a shadow: the script sees no values there. None: all."""


# Checked on arrival: a copy damaged on its way would make a holder of wrong bits.
@dataclass(frozen=True, kw_only=True)
class TakeCopy:
    """Copy a shard's state, or a piece of it, from the payload. Answer, after the last piece: `TookCopy`."""

    step: int
    shard: int
    payload: Any
    source: str
    digest: int | None
    """Expected digest; None: the one in the payload."""
    part: tuple[int, int] = (0, 1)
    """Number of the piece and number of pieces. The pieces come in order."""


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Free the state of this shard: this member is no longer a holder."""

    shard: int


# Read in the background. A state that is about to change before that is copied first, so that no step waits.


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Capture the present states of these shards for the checkpoint of `step`."""

    step: int
    shards: tuple[int, ...]
    digests: tuple[int | None, ...]
    """Per shard, the digest if it is known. A state that changes before it is written is not of that step."""


@dataclass(frozen=True, kw_only=True)
class DropCaptures:
    """Free what was captured for the checkpoint of `step`, which is over, and is not written."""

    step: int


# Not earlier: until the commit another primary may need any of them.


@dataclass(frozen=True, kw_only=True)
class EndAttempt:
    """Free the attempt's partials, folds and finished gradients, because the step is committed."""

    step: int


# The maker checks, because only it can tell changed memory from damage on the way.


@dataclass(frozen=True, kw_only=True)
class CheckPartial:
    """Check if this member's partial is still as it was sent. Answer: `PartialChecked`."""

    step: int
    block: int
    node: Node


@dataclass(frozen=True, kw_only=True)
class CheckGradient:
    """Check if a kept finished gradient is still what its primary had. Answer, if it is not: `GradientsKept`."""

    step: int
    shard: int


# By all members, when each has stopped reading the others' memory.


@dataclass(frozen=True, kw_only=True)
class VoidAttempt:
    """Discard the open step's partials, folds and finished gradients, because the step starts again."""

    step: int


Work: TypeAlias = (
    CheckPartial
    | CheckGradient
    | VoidAttempt
    | CombineOwn
    | TakeBoundary
    | DropBoundaries
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
