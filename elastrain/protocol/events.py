"""Events of a member's machine: frozen values, fed one at a time.

`payload` is the data that the driver's transport delivers with a message (tensors in production, symbols in the
simulator). The machine never looks at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from elastrain.job.fold import Node
from elastrain.job.world import View
from elastrain.pipeline.planner.plan_choice import PlanAnswer
from elastrain.pipeline.planner.plan_vote import ToldMemory
from elastrain.protocol.loop_events import (
    BatchEvaluated,
    Began,
    BlockDone,
    Checked,
    Computed,
    EvaluationBegun,
    LoopEnded,
    Ready,
    StateWanted,
    StreamRead,
    Submitted,
    Traced,
)
from elastrain.protocol.messages import Message


# It may come late, twice, or after a newer one: the machine goes by generations.
@dataclass(frozen=True, kw_only=True)
class Viewed:
    """The launcher's notice of the newest view."""

    view: View


@dataclass(frozen=True, kw_only=True)
class CommitAllowed:
    """The launcher's permission for the first commit of the job."""


# With the sender's generation, because a message means something else in another view.
@dataclass(frozen=True, kw_only=True)
class Arrived:
    """A message that came in over a link."""

    source: str
    generation: int
    message: Message
    payload: Any = None


# Shards of the command, not of the present roles, which may have changed while they were read.
@dataclass(frozen=True, kw_only=True)
class LinksTimed:
    """The rates, in bytes per second, with which large frames of other members came in during the last step."""

    bytes_per_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class InitialRead:
    """Result of `ReadInitial`: the model has all parameters, and these shards' states are in memory."""

    shards: tuple[int, ...]


# Squared, so that the record can add those of all shards and take the root once.
@dataclass(frozen=True, kw_only=True)
class GradientsFinished:
    """Result of `FinishGradients`: squared norms per shard."""

    step: int
    square_norms: dict[int, float]
    damaged: tuple[int, ...] = ()
    """Shards with a lane that has changed since it was added up."""


# Found while it is used: a change between a check and the addition would be added unseen.
@dataclass(frozen=True, kw_only=True)
class PartialDamaged:
    """Result of `Keep` or `CombineShard` if a partial of a shard's lane is not what its maker had."""

    step: int
    shard: int
    lane: int
    node: Node
    maker: str
    """Empty if it was added up here."""


@dataclass(frozen=True, kw_only=True)
class GradientsKept:
    """Result of `StoreGradients`: the gradients of `source` that are as their primary had them, and damaged ones."""

    step: int
    shards: tuple[int, ...] = ()
    damaged: tuple[int, ...] = ()
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class PartialChecked:
    """Result of `CheckPartial`. `is_intact`: this member still has what it sent."""

    step: int
    block: int
    is_intact: bool


# Per shard and step, since a backup may be behind by several shards, and by a step.
@dataclass(frozen=True, kw_only=True)
class AppliedBehind:
    """Result of `ApplyBehind`: the digest of the backup's scratch."""

    step: int
    shard: int
    digest: int


@dataclass(frozen=True, kw_only=True)
class StatesDigested:
    """Result of `ComputeDigests`."""

    step: int
    digests: dict[int, int]
    published: dict[int, int]


# `turn` is the command's: others may have been given in between.
@dataclass(frozen=True, kw_only=True)
class ParametersDigested:
    """Result of `DigestParameters`: shard -> digest of the parameters that the model computes with."""

    turn: int
    digests: dict[int, int]


# The state before shows if memory changed; the update shows if the arithmetic is wrong.
@dataclass(frozen=True, kw_only=True)
class UpdatedAgain:
    """Result of `UpdateAgain`: digests of the state before the step, and of the update made again from it."""

    step: int
    shard: int
    before: int
    has_gradient: bool
    """True if the gradient is still what its primary had."""
    digest: int


@dataclass(frozen=True, kw_only=True)
class DigestedAgain:
    """Result of `DigestAgain`."""

    step: int
    shard: int
    parameters: bool
    asker: str
    digest: int


@dataclass(frozen=True, kw_only=True)
class UpdateTried:
    """Result of `TryUpdate`: digests of the received state, and of the update made from it."""

    step: int
    shard: int
    before: int
    has_gradient: bool
    """True if the gradient arrived as it was sent."""
    digest: int
    asker: str


# With the sender, which is asked again if the copy is damaged.
@dataclass(frozen=True, kw_only=True)
class TookCopy:
    """Result of `TakeCopy`. `intact`: the received state's digest is `told`, the one that came with it."""

    step: int
    shard: int
    intact: bool
    source: str
    told: int


# From the loop, a clock or the launcher. The machine itself counts steps.
@dataclass(frozen=True, kw_only=True)
class CheckpointWanted:
    """A request to make the next committed step a checkpoint. `last`: the job is about to be stopped."""

    last: bool


@dataclass(frozen=True, kw_only=True)
class PartWritten:
    """Result of `BeginPart` or `CaptureLoop`: the written parts, or the problem that prevented writing."""

    step: int
    shards: tuple[int, ...]
    told: tuple[str, ...]
    problem: str


@dataclass(frozen=True, kw_only=True)
class ManifestWritten:
    """Result of `WriteManifest`: the checkpoint is visible, or given up for this reason."""

    step: int
    reason: str
    told: str
    """With local disks: the manifest, for the other nodes."""


@dataclass(frozen=True, kw_only=True)
class TookFetched:
    """Result of `TakeFetched`. `intact`: the state's digest is the one that came with it."""

    step: int
    shard: int
    intact: bool
    source: str


@dataclass(frozen=True, kw_only=True)
class JobEnded:
    """The launcher's notice that a member left regularly: all members had the last step, and none has to wait."""

    # From the launcher, because the member that left can no longer send a message, and its link only closes.


@dataclass(frozen=True, kw_only=True)
class CopyBudgetSet:
    """Bytes of parameters that may be on their way to new holders; sent when the free memory has changed."""

    parameters_bytes: int
    has_room_for_all: bool = True
    """True if there is room for all blocks at the end of the loop, on a member that has only some of them."""
    refused: frozenset[int] = frozenset()
    """Shards of which this member takes no copy as a backup, because its memory limit leaves no room for one."""


# An event, because the machine has no clock: the driver measures how much a copy slows the training loop.
@dataclass(frozen=True, kw_only=True)
class CopiesAllowed:
    """Permission to send copies of this many bytes of parameters now, while runs are computed.

    In pipelines it allows one piece.
    """

    parameters_bytes: int
    busy: frozenset[str] = frozenset()
    """Members that get none now: more bytes wait to be sent to them than one piece has."""


# An event, because the machine has no clock.
@dataclass(frozen=True, kw_only=True)
class StepTimed:
    """The median time of a micro-batch of a committed step on this member, in jobs without pipelines."""

    micro_batch_s: float | None
    """None: it computed none."""
    has_room: bool = True
    """True if this member has memory for the gradients of any share of the runs."""


# With what was asked about: the view, or the plan in force, may be another one by now.
@dataclass(frozen=True, kw_only=True)
class Planned:
    """Answer to `ChoosePlan`. It may come late, twice or never."""

    generation: int
    present: str
    answer: PlanAnswer | None
    """None: no plan fits."""


@dataclass(frozen=True, kw_only=True)
class MemorySeen:
    """Memory that this member holds at a commit in pipelines, and may hold."""

    memory: ToldMemory


Event: TypeAlias = (
    CopyBudgetSet
    | CopiesAllowed
    | MemorySeen
    | Planned
    | StepTimed
    | JobEnded
    | Viewed
    | CommitAllowed
    | Arrived
    | LinksTimed
    | InitialRead
    | Began
    | Ready
    | Submitted
    | BlockDone
    | StreamRead
    | Checked
    | Traced
    | Computed
    | GradientsFinished
    | PartialDamaged
    | GradientsKept
    | PartialChecked
    | AppliedBehind
    | StatesDigested
    | ParametersDigested
    | UpdatedAgain
    | UpdateTried
    | DigestedAgain
    | TookCopy
    | CheckpointWanted
    | PartWritten
    | ManifestWritten
    | LoopEnded
    | StateWanted
    | TookFetched
    | EvaluationBegun
    | BatchEvaluated
)
