"""What comes out of a member's machine: frozen values, to be carried out in order before the next event.

What commands do to the model's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from elastrain.decisions.rerouting import Rerouting
from elastrain.job.fold import Node
from elastrain.job.placement import Placement
from elastrain.job.values import Record, Recovery
from elastrain.job.world import View
from elastrain.pipeline.pipeline_plan import Task
from elastrain.protocol.messages import Message
from elastrain.protocol.work_commands import Apply, Bind, TakeParameters, Work


# In place: links between members that stay are kept, so that a loss costs the others no connection.
@dataclass(frozen=True, kw_only=True)
class EditMesh:
    """Edit the mesh in place to this view, while `step` is tried; from now on frames of older generations are void."""

    view: View
    step: int


# Once in each view: who asked in the last one may have been answered there.
@dataclass(frozen=True, kw_only=True)
class AskToCommit:
    """All have voted for the first commit of the job: have the store told before. Answer: `CommitAllowed`."""


# Names instead of tensors: this machine never touches a number, and the driver knows where they lie.


@dataclass(frozen=True, kw_only=True)
class SendMessage:
    """Send with the tensors that the message names."""

    to: str
    message: Message


# Asked for and not guessed from frames: which view stands is known to the store alone.


@dataclass(frozen=True, kw_only=True)
class ReadView:
    """A frame of a newer generation came: another member knows a view that this one has not seen."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Let the training loop compute this run, with losses times `loss_scale`. Answer if `probed`: `Checked`."""

    step: int
    run: int
    # Of this very step, from the last record: a newcomer scales as all others do.
    loss_scale: float = 1.0
    probed: bool = False
    audited: bool = False
    """Answer once more, of the whole run."""


# The first micro-batch alone, because a run's others are added to it in place and cannot be told apart.


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Let the training loop compute the first micro-batch of another member's run: it counts for nothing.

    Answer: `Checked`.
    """

    step: int
    run: int
    loss_scale: float = 1.0
    whole: bool = False
    """The whole run, for an audit."""


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Let the training loop compute one micro-batch forwards through a task. Answers: `Computed`, then `Ready`.

    Where the task ends with the loss, the loop's backward follows at once: two `Computed`, the forward's first.
    """

    step: int
    task: Task
    micro_batch: int
    # Of this very step, from the last record: a newcomer scales as all others do.
    loss_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Backward:
    """Let the training loop compute the backward of a micro-batch that has gone forward.

    Answers: `BlockDone` of each block of the task if it is the run's last one, `Computed`, then `Ready`.
    """

    step: int
    task: Task
    micro_batch: int


# Not before the parameters are here: the script may look at the model as soon as its loop goes on.


@dataclass(frozen=True, kw_only=True)
class Advance:
    """`record.step` is committed and its parameters are here: let the training loop leave the step."""

    record: Record


# At the beginning of a step: a script cannot enter its loop in the middle of one.


@dataclass(frozen=True, kw_only=True)
class Enter:
    """Let the training loop of a fresh member begin at `step`; `state` is None at the start of the job."""

    step: int
    state: str | None
    payload: Any = None
    """What came beside the state."""


# By a view and not by a message: whoever is in it knows that nothing of the former attempt reaches it any more.


@dataclass(frozen=True, kw_only=True)
class BeginAnew:
    """Something of the open step is wrong: a view is wanted in which it begins anew, after this `generation`."""

    generation: int
    reason: str


# In place: the right slot is free afterwards, and memory does not grow with the number of runs.


@dataclass(frozen=True, kw_only=True)
class Noticed:
    """Something went wrong and was put right: to be said and logged (carries no work)."""

    reason: str


# At once: the publisher's memory moves on with its next update, as soon as all have voted again.


@dataclass(frozen=True, kw_only=True)
class Passed:
    """This member holds the record (for logs; carries no work)."""

    record: Record


@dataclass(frozen=True, kw_only=True)
class Decided:
    """All of the view have reported while `step` was tried; what they decide comes next (for faults; no work)."""

    step: int


# Before anything of the new plan takes memory: what does not fit is said while nothing has begun.


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The view is in order and the open step goes on: for logs, and for the planning of memory.

    Answer, if the driver has limits: `CopyBudgetSet`.
    """

    view: View
    recovery: Recovery
    target: Placement
    """Where shards are to be held in this view."""
    own: frozenset[Node]
    """This member's partials of the open step, of all blocks."""
    is_checking: bool
    """A neighbour's micro-batch is still to be computed here."""
    rerouting: Rerouting | None = None
    """Of a step in pipelines: who computes what of it from now on."""


# Before the first state is captured: so it is known when the last one is written.


@dataclass(frozen=True, kw_only=True)
class BeginPart:
    """Write these shards of the checkpoint of `step`, as `Capture` brings them. Answer: `PartWritten`."""

    step: int
    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CaptureLoop:
    """Keep what a newcomer's loop would need to enter step `step + 1`, for the checkpoint of `step`."""

    step: int
    state: str
    is_written: bool
    """Onto this node's own disk. Answer: `PartWritten` of LOOP."""


@dataclass(frozen=True, kw_only=True)
class WriteManifest:
    """All parts of the checkpoint are written: make it visible, if this group is still the job's.

    Answer: `ManifestWritten`.
    """

    record: Record
    told: tuple[str, ...]
    """Of all shards."""
    loops: tuple[str, ...]
    """Of the loop's state, where it is written on every node."""


@dataclass(frozen=True, kw_only=True)
class EndCheckpoint:
    """The checkpoint of `step` is complete, or given up for this reason: let go of what belongs to it."""

    step: int
    reason: str
    is_told: bool
    """This member tells people of it, for all."""
    told: str
    """As in `ManifestWritten`."""


@dataclass(frozen=True, kw_only=True)
class HoldBlocks:
    """From now on the model's memory has the parameters of these blocks of the layout, ascending, and no others.

    What comes has any content until `TakeParameters`. Nothing computes with a block that goes.
    """

    blocks: tuple[int, ...]
    for_good: bool = False
    """The loop has ended: the memory of gradients makes room for what comes."""


@dataclass(frozen=True, kw_only=True)
class Leave:
    """All members are done, or this one was removed: let the process end."""

    evicted: bool = False
    overruled: bool = False
    """The loop is in a step before which most members have ended: nothing of that step counts."""


@dataclass(frozen=True, kw_only=True)
class Fail:
    """This member, or the job, cannot go on. `kind` is the name of the error in elastrain.errors, which says which."""

    kind: str
    reason: str


Command: TypeAlias = (
    Work
    | EditMesh
    | SendMessage
    | ReadView
    | AskToCommit
    | BeginAnew
    | Compute
    | Recompute
    | Forward
    | Backward
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
    | Leave
    | Fail
)


def overwrites(command: Any) -> tuple[int, ...]:
    """The shards whose parameters in the model this command replaces by a state's, or by published ones."""
    match command:
        case Apply():
            return command.shards
        case Bind() | TakeParameters():
            return (command.shard,)
        case _:
            return ()
