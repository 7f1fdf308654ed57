"""Commands of a member's machine: frozen values, to be carried out in order before the next event.

`overwrites` tells which parameters of the model a command replaces. Commands that are work on gradients and states are
in `work_commands`, those for the training loop's computations in `loop_commands`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from elastrain.decisions.rerouting import Rerouting
from elastrain.job.fold import Node
from elastrain.job.placement import Placement
from elastrain.job.values import Record, Recovery
from elastrain.job.world import View
from elastrain.pipeline.planner.plan_choice import PlanQuestion
from elastrain.pipeline.planner.plan_vote import ToldMemory
from elastrain.protocol.loop_commands import LoopCommand
from elastrain.protocol.messages import Message
from elastrain.protocol.work_commands import Apply, ApplyBehind, Bind, TakeParameters, Work


# In place: links between members that stay are kept, so a loss costs the others no connection.
@dataclass(frozen=True, kw_only=True)
class EditMesh:
    """Change the mesh to the members of this view, during `step`. Frames of older generations are void afterwards."""

    view: View
    step: int


# Once in each view, because the answer may have gone to the former view.
@dataclass(frozen=True, kw_only=True)
class AskToCommit:
    """Have the store told that the first commit is due: all members have voted for it. Answer: `CommitAllowed`."""


# Names instead of tensors: the machine never handles numbers, and the driver knows where they are.


@dataclass(frozen=True, kw_only=True)
class SendMessage:
    """Send the message with the tensors that it names."""

    to: str
    message: Message


# Requested, because only the store knows which view is valid; frames do not prove it.


@dataclass(frozen=True, kw_only=True)
class ReadView:
    """Read the newest view: a frame of a newer generation shows that another member knows a later one."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class TakeFetched:
    """Copy a shard's state for the script, from the payload or from this member's own. Answer: `TookFetched`."""

    step: int
    shard: int
    payload: Any
    """None: copy this member's own state."""
    source: str
    digest: int | None
    """Expected digest; None: the one in the payload."""


# The parameters have arrived by then: the script may look at the model as soon as its loop continues.


@dataclass(frozen=True, kw_only=True)
class Advance:
    """Let the training loop leave the step: `record.step` is committed, and its parameters are here."""

    record: Record


# At the beginning of a step, because a script cannot enter its loop in the middle of one.


@dataclass(frozen=True, kw_only=True)
class Enter:
    """Let the training loop of a new member begin at `step`. `state` is None at the start of the job."""

    step: int
    state: str | None
    payload: Any = None
    """Tensors that came with the state."""


# In a thread, because the engine's thread has to serve peers meanwhile. No rule of the machine waits for the answer.


@dataclass(frozen=True, kw_only=True)
class ChoosePlan:
    """Let the planner choose the best plan. Answer: `Planned`, at any time."""

    generation: int
    present: str
    """Digest of the plan in force."""
    question: PlanQuestion
    told: Mapping[str, ToldMemory]
    """Member of the view -> its memory, as it told it."""


# By a view and not by a message: its members know that nothing of the former attempt can reach them.


@dataclass(frozen=True, kw_only=True)
class BeginAnew:
    """Request a view in which the open step starts again after an error, with a later generation than `generation`."""

    generation: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Noticed:
    """Report and log an error that was repaired. Carries no work."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Passed:
    """Log that this member holds the record. Carries no work."""

    record: Record


@dataclass(frozen=True, kw_only=True)
class Decided:
    """Allow a fault at this place: all members of the view have reported, during `step`. Carries no work."""

    step: int


# Before the new plan takes any memory, so that a lack of memory is reported before work begins.


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Log that the open step resumes in this view, and plan the memory for it.

    Answer, if the driver has limits: `CopyBudgetSet`.
    """

    view: View
    recovery: Recovery
    target: Placement
    """Planned holders of the shards in this view."""
    own: frozenset[Node]
    """This member's partials of the open step, of all blocks."""
    is_checking: bool
    """True if a neighbour's micro-batch is still to be computed here."""
    rerouting: Rerouting | None = None
    """Tasks of an open step in pipelines; None for whole runs."""


# Before the first state is captured, so that the driver can tell when the last one is written.


@dataclass(frozen=True, kw_only=True)
class BeginPart:
    """Write these shards of the checkpoint of `step`, as `Capture` brings them. Answer: `PartWritten`."""

    step: int
    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CaptureLoop:
    """Keep the loop state that a newcomer would need to enter step `step + 1`, for the checkpoint of `step`."""

    step: int
    state: str
    is_written: bool
    """True if it is written to this node's own disk. Answer: `PartWritten` of LOOP."""


@dataclass(frozen=True, kw_only=True)
class WriteManifest:
    """Make the checkpoint visible, if this group still belongs to the job. All its parts are written.

    Answer: `ManifestWritten`.
    """

    record: Record
    told: tuple[str, ...]
    """Places and digests of all shards, as in `PartReport.told`."""
    loops: tuple[str, ...]
    """The same for the loop's state, if it is written on every node."""


@dataclass(frozen=True, kw_only=True)
class EndCheckpoint:
    """End the checkpoint of `step`, which is complete or given up for this reason, and free what belongs to it."""

    step: int
    reason: str
    is_told: bool
    """True if this member reports it to people, for all members."""
    told: str
    """Manifest, as in `ManifestWritten`."""


@dataclass(frozen=True, kw_only=True)
class TakeOwnUpdate:
    """Make a backup's updates in scratch now, and compute with their parameters. `ApplyBehind` then only digests."""

    updates: tuple[ApplyBehind, ...]


@dataclass(frozen=True, kw_only=True)
class HoldBlocks:
    """Keep the parameters of these blocks of the layout, ascending, and no others in the model's memory.

    New blocks have undefined content until `TakeParameters`. No computation uses a block that goes.
    """

    blocks: tuple[int, ...]
    for_good: bool = False
    """True after the end of the loop: the memory of gradients makes room for new blocks."""


# The recovery that makes a shadow a replica publishes only what the shadow has not read.
@dataclass(frozen=True, kw_only=True)
class ShowParameters:
    """Let the script see the parameters of these shards, which this member has read whole as a shadow."""

    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Log that a move of blocks has ended with the record of `step`. Carries no work."""

    step: int
    named: int
    """Step whose record has named the move."""
    shadows: tuple[tuple[str, tuple[int, ...]], ...]
    """(member, blocks of the graph that it was a shadow of)."""
    is_dropped: bool
    """True if another plan has followed. False: the shadows are replicas."""
    sent_bytes: int
    """Bytes that this member has sent to shadows so far."""


@dataclass(frozen=True, kw_only=True)
class Leave:
    """Let the process end: all members are done, or this one was removed."""

    evicted: bool = False
    overruled: bool = False
    """True if the loop is in a step before which most members have ended. Nothing of that step counts."""


@dataclass(frozen=True, kw_only=True)
class Fail:
    """End with an error: this member or the job cannot go on. `kind` is the name of the class in elastrain.errors."""

    kind: str
    reason: str


Command: TypeAlias = (
    Work
    | LoopCommand
    | EditMesh
    | SendMessage
    | ReadView
    | AskToCommit
    | BeginAnew
    | ChoosePlan
    | Advance
    | Enter
    | Noticed
    | Passed
    | Decided
    | Resumed
    | BeginPart
    | CaptureLoop
    | WriteManifest
    | EndCheckpoint
    | HoldBlocks
    | ShowParameters
    | TakeOwnUpdate
    | Moved
    | TakeFetched
    | Leave
    | Fail
)


def overwrites(command: Any) -> tuple[int, ...]:
    """Return the shards whose parameters in the model this command overwrites, from a state or a publish."""
    match command:
        case Apply():
            return command.shards
        case TakeOwnUpdate():
            return tuple(update.shard for update in command.updates)
        case Bind() | TakeParameters():
            return (command.shard,)
        case _:
            return ()
