"""What goes into a member's machine: frozen values, fed one at a time.

`payload` is whatever the driver's transport delivers beside a message (tensors in production, symbols in the
simulator): it is never looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from elastrain.job.fold import Node
from elastrain.job.values import Check, Contribution, TracedGraph
from elastrain.job.world import View
from elastrain.pipeline.actions import TaskAction
from elastrain.protocol.messages import Boundary, Message


# It may come late, twice, or after a still newer one: the machine goes by generations.
@dataclass(frozen=True, kw_only=True)
class Viewed:
    """The launcher says that this is the newest view."""

    view: View


@dataclass(frozen=True, kw_only=True)
class CommitAllowed:
    """The launcher says that the first commit of the job may be made."""


# With the sender's generation: the same words of an older view, or of a newer one, mean something else.
@dataclass(frozen=True, kw_only=True)
class Arrived:
    """A message came in over a link."""

    source: str
    generation: int
    message: Message
    payload: Any = None


# Taken by every member in every step: when a newcomer comes, and which member hands it over then, is not known.
@dataclass(frozen=True, kw_only=True)
class Began:
    """The training loop entered `step` with these settings; `state` is what a newcomer would need to do the same."""

    step: int
    settings: str
    state: str


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The training loop has nothing to compute and wants to go on."""

    # Without it nothing is committed: the script may still read the parameters that a commit overwrites.


# Of what was asked for, not of what is wanted by now: roles may have changed while it was read.
@dataclass(frozen=True, kw_only=True)
class InitialRead:
    """Result of `ReadInitial`: the model has all parameters, and these shards' states are in memory."""

    shards: tuple[int, ...]


# By block: the last blocks of the model are reduced while the backward of the first ones still runs.
@dataclass(frozen=True, kw_only=True)
class BlockDone:
    """The gradient of one block over one run is complete."""

    step: int
    run: int
    block: int
    contribution: Contribution
    touched: int


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What came of a run's first micro-batch alone: of a probed `Compute`, or of `Recompute`. None: it was given up."""

    step: int
    run: int
    check: Check | None
    whole: bool = False
    """Of the whole run, where that is audited."""


# Once, before the loop asks for work the first time: nobody can be given a task of a graph that it has not seen.
@dataclass(frozen=True, kw_only=True)
class Traced:
    """The tracing pass is over; only where the job computes in pipelines."""

    model: TracedGraph


# After the `BlockDone`s of the same backward, so that a task that is done has all its gradients.
@dataclass(frozen=True, kw_only=True)
class Computed:
    """An action of a task is done. Where the task ends with the loss, `Forward` brings two: forward and backward."""

    step: int
    action: TaskAction
    made: Boundary | None
    """What others have to be sent; None at the batch and at the loss. The driver has its tensors by now."""
    is_last: bool
    """The backward of the run's last micro-batch: nothing more is added to the task's gradients."""


# Squared, so that those of all shards can be added in the record; the root is taken once, there.
@dataclass(frozen=True, kw_only=True)
class GradientsFinished:
    """Result of `FinishGradients`: squared norms per shard."""

    step: int
    square_norms: dict[int, float]
    damaged: tuple[int, ...] = ()
    """Shards of which a lane was not what it was when it had been added up."""


# While it is used, and not before: what changes between a look and the addition would be added unseen.
@dataclass(frozen=True, kw_only=True)
class PartialDamaged:
    """Result of `Keep` or `CombineShard` where a partial of a shard's lane is not what its maker had."""

    step: int
    shard: int
    lane: int
    node: Node
    maker: str
    """Empty: it was added up here."""


@dataclass(frozen=True, kw_only=True)
class GradientsKept:
    """Result of `StoreGradients`: which of the finished gradients of `source` are what their primary had."""

    step: int
    shards: tuple[int, ...] = ()
    damaged: tuple[int, ...] = ()
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class PartialChecked:
    """Result of `CheckPartial`: whether this member still has what it has sent."""

    step: int
    block: int
    is_intact: bool


# Per shard and step, since a backup may be several shards, and a step, behind.
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


# The command's: others may have been given in between.
@dataclass(frozen=True, kw_only=True)
class ParametersDigested:
    """Result of `DigestParameters`: shard -> digest of what the model computes with."""

    turn: int
    digests: dict[int, int]


# The state before tells whether it was the memory that changed, the update whether the arithmetic is at fault.
@dataclass(frozen=True, kw_only=True)
class UpdatedAgain:
    """Result of `UpdateAgain`: digests of the state before the step, and of the update made again from it."""

    step: int
    shard: int
    before: int
    has_gradient: bool
    """The gradient is still what its primary had."""
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
    """Result of `TryUpdate`: digests of the state that came, and of the update that was made from it."""

    step: int
    shard: int
    before: int
    has_gradient: bool
    """The gradient has come as it was sent."""
    digest: int
    asker: str


# The sender is named: where the copy is damaged, it is asked again.
@dataclass(frozen=True, kw_only=True)
class TookCopy:
    """Result of `TakeCopy`: whether the digest of what was received is `told`, the one that came with it."""

    step: int
    shard: int
    intact: bool
    source: str
    told: int


# From outside of the steps: the loop, a clock, or the launcher; a step's number is counted in the machine.
@dataclass(frozen=True, kw_only=True)
class CheckpointWanted:
    """The next step that is committed should become a checkpoint. `last`: the job is about to be stopped."""

    last: bool


@dataclass(frozen=True, kw_only=True)
class PartWritten:
    """Result of `BeginPart` or `CaptureLoop`: what was written, or the problem that kept it from being."""

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
    """Where disks are local: the manifest, for the other nodes."""


# With the step: loops that end by a decision of the script may end at different ones.
@dataclass(frozen=True, kw_only=True)
class LoopEnded:
    """The training loop ended before `step`."""

    step: int


@dataclass(frozen=True, kw_only=True)
class JobEnded:
    """The launcher says that a member left in peace: all had the last step, nobody is waited for."""

    # From the launcher, because the member that left cannot say it any more, and its link only closes.


@dataclass(frozen=True, kw_only=True)
class CopyBudgetSet:
    """So many bytes of parameters may be on their way to new holders: what memory leaves for them has changed."""

    parameters_bytes: int
    has_room_for_all: bool = True
    """Whether there is room for all blocks at the end of the loop, where this member has some blocks only."""


# An event, because the core has no clock: what a copy costs the training loop is measured by the driver.
@dataclass(frozen=True, kw_only=True)
class CopiesAllowed:
    """There is time now to send copies of so many bytes of parameters, while runs are computed."""

    parameters_bytes: int


Event: TypeAlias = (
    CopyBudgetSet
    | CopiesAllowed
    | JobEnded
    | Viewed
    | CommitAllowed
    | Arrived
    | InitialRead
    | Began
    | Ready
    | BlockDone
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
)
