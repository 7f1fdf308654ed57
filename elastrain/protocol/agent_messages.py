"""Messages between a worker and its agent, in both directions. Both ends import these kinds.

A message is one line of JSON over the worker's channel (`FROM_WORKER`, `TO_WORKER`). The agent's core and the worker's
machine decide what follows from a message.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from elastrain.job.world import View
from elastrain.protocol.codec import LineCodec, Tagged


class Hello(Tagged, frozen=True, kw_only=True):
    """A notice that the worker can join: its model is built, its mesh listens.

    Its beacon's descriptor is sent with it.
    """

    member: str
    address: str
    """Address at which its mesh listens."""
    spec: dict[str, Any]
    """Settings that all members must have in common; see `Settings.describe`."""
    # Values and not a digest, so that a refusal can name the setting and both values.


class Suspect(Tagged, frozen=True, kw_only=True):
    """A notice that the worker cannot reach `member`.

    `dead`: the robust mutex proves that the member's process has ended.
    """

    member: str
    reason: str
    # A proof needs no second report. Without one, the agents wait for reports of other members.
    dead: bool = False
    generation: int = 0
    """Generation of the view in which it could not reach the member."""
    link_lost: bool = False
    """True if their connection broke or was never made. It may come about again."""


class StepAnew(Tagged, frozen=True, kw_only=True):
    """A request for a view in which the open step starts again, because the worker has found an error in it."""

    generation: int
    """Generation of the view in which the error was found. A view that restarted the step later is enough."""
    reason: str


class Reading(Tagged, frozen=True, kw_only=True):
    """Progress of reading the checkpoint that the job starts from; sent from time to time."""

    done_bytes: int
    size_bytes: int


class FirstCommitDue(Tagged, frozen=True, kw_only=True):
    """A notice that all members have voted for the job's first commit. Answer: `FirstCommitAllowed`."""

    # The commit waits for the store. Else others could take this node for dead and start from the initial state.


class Progress(Tagged, frozen=True, kw_only=True):
    """A notice that the worker has passed the commit of `step`."""

    step: int
    loss: float | None = None
    """Weighted mean over the global batch; None if it is not a number."""
    # JSON has no NaN; `status` shows a dash instead.
    samples: int | None = None
    micro_batch_s: float | None = None
    """Median time of a micro-batch on this worker, in seconds; None if it computed none."""
    holders: dict[str, tuple[str, ...]] | None = None
    """Shard -> its primary, then its backups. Sent only when they have changed."""
    # Large jobs have thousands of shards, and their holders stay the same for most steps.


class WorkTold(Tagged, frozen=True, kw_only=True):
    """Share and memory of the worker, for people; sent at most once a second, after a commit."""

    until: int
    """The step before which the worker's loop ends."""
    micro_batches: float
    """Mean number of micro-batches per step that the worker has computed since its last report."""
    memory_bytes: int | None = None
    """Memory of the process: with a limit the peak of a step, else what is held now."""
    memory_limit_bytes: int | None = None


class WaitReason(Tagged, frozen=True, kw_only=True):
    """A notice why the worker has not passed the open step yet; sent when the reason has held for a second."""

    step: int
    """The open step."""
    reason: str


class Window(Tagged, frozen=True, kw_only=True):
    """Shards with fewer living holders than they should have; sent when that has changed."""

    step: int
    """The open step."""
    short: dict[str, int]
    """Shard -> number of its living holders. Empty if all have as many as they should."""
    since_step: int | None = None
    """The step that was open when the first of these shards lost a holder."""
    no_room: tuple[str, ...] = ()
    """Members that have no room for copies of the worker's shards."""


class SharesChanged(Tagged, frozen=True, kw_only=True):
    """A notice that the runs are shared in another way from the step after `step` on.

    The first member of the view sends it.
    """

    step: int
    reason: str


class Redone(Tagged, frozen=True, kw_only=True):
    """A notice that pipelines compute a part of the open step again after a loss.

    All members of the view send the same.
    """

    generation: int
    """Generation of the view without the lost members."""
    step: int
    pairs: int
    """Number of (block, run) pairs."""


class PlanTold(Tagged, frozen=True, kw_only=True):
    """A notice of a new plan of pipelines, of the last decision about plans, or of both."""

    step: int | None = None
    """The first step of a new plan. None: the plan stays."""
    pipelines: tuple[dict[str, Any], ...] = ()
    """See `PipelinePlan.described`."""
    reason: str = ""
    speeds: dict[str, float] = {}  # noqa: RUF012 - msgspec copies it for each value
    """Member -> speed relative to its peers, as far as they are known."""


class OnDevice(Tagged, frozen=True, kw_only=True):
    """A notice of the accelerator that the worker computes on; sent before its `Hello`. A worker on the CPU sends none.

    Devices are told by name and UUID.
    """

    device: str
    seen: tuple[str, ...]
    """The devices that the process sees, by index."""


class Failed(Tagged, frozen=True, kw_only=True):
    """A notice that the user's script or a device has raised; the worker ends after it."""

    step: int
    # None if the script raised outside of any micro-batch.
    micro_batch: int | None
    signature: str
    """Type and text of the exception. Two members with one signature at one place failed for one reason."""
    traceback: str
    device: str = ""
    """Name and UUID of the device that failed; "" for an exception that no device has raised."""
    # A text that people can read is the identity, too: simulated nodes that share a device name it alike.


class LostState(Tagged, frozen=True, kw_only=True):
    """A notice that no living member holds the state of some shard."""

    # A sentence and not a list of shards, because only people need to know which.
    sentence: str


class Diverged(Tagged, frozen=True, kw_only=True):
    """A notice that two members differ where they must be equal, and that no replacement can repair it.

    The job ends.
    """

    sentence: str


class NoRoom(Tagged, frozen=True, kw_only=True):
    """A notice that the present plan does not fit this worker's memory limit. The sentence says how much is missing."""

    sentence: str


class Finished(Tagged, frozen=True, kw_only=True):
    """A notice that the worker has passed the end of the job, before `step`, with parameters of this digest."""

    step: int
    digest: str
    """Empty if its memory limit left no room for all of them."""
    raised: bool = False
    """True if its script was leaving the loop by an exception, which the script may still catch."""


class Struck(Tagged, frozen=True, kw_only=True):
    """A notice that the worker has reached the point of an injected fault that its agent must carry out."""

    # Only the agent can, for example, kill a whole node: all its workers and then itself.
    number: int


class CheckpointReady(Tagged, frozen=True, kw_only=True):
    """A question whether the checkpoint of `step`, whose parts are written, may become visible.

    Answer: `CheckpointSettled`.
    """

    # The store decides: a member that was left out without knowing it must not publish a checkpoint.
    step: int
    name: str
    size_bytes: int


class CheckpointEnded(Tagged, frozen=True, kw_only=True):
    """A notice that the checkpoint of `step` is visible, or given up for this reason.

    The member of lowest rank sends it.
    """

    step: int
    size_bytes: int = 0
    took_s: float = 0.0
    reason: str = ""
    last: bool = False
    """True if the job was to be stopped with this checkpoint."""


class Note(Tagged, frozen=True, kw_only=True):
    """A line for the run's event log, with the worker's own fields."""

    fields: dict[str, Any]


FromWorker: TypeAlias = (
    Hello
    | Reading
    | Suspect
    | StepAnew
    | FirstCommitDue
    | Progress
    | WorkTold
    | WaitReason
    | Window
    | SharesChanged
    | Redone
    | PlanTold
    | OnDevice
    | Failed
    | LostState
    | Diverged
    | NoRoom
    | Finished
    | Struck
    | CheckpointReady
    | CheckpointEnded
    | Note
)
FROM_WORKER: LineCodec[FromWorker] = LineCodec(FromWorker)


class NewView(Tagged, frozen=True, kw_only=True):
    """The view in the store. Members that it leaves out get it too, and so learn that they have to end."""

    # The whole view and not its changes, because a worker may have missed some views.
    view: View


class FirstCommitAllowed(Tagged, frozen=True, kw_only=True):
    """A notice that the store has recorded the first commit as due. No member starts the job again beside it."""


class EndReached(Tagged, frozen=True, kw_only=True):
    """A notice that a member has passed the end of the job. No member waits for others after it."""


class ArmFault(Tagged, frozen=True, kw_only=True):
    """An order for an injected fault at this step and phase. None stands for the first one that comes."""

    kind: str
    step: int | None
    phase: str | None
    for_s: float | None = None
    """Duration in seconds; None: for ever, or no time at all, depending on the kind."""
    options: dict[str, str | int | float] = {}  # noqa: RUF012 - msgspec copies it for each value
    number: int | None = None
    """Number for the worker's `Struck`, if the agent has to carry out the fault; else None."""


class Drain(Tagged, frozen=True, kw_only=True):
    """An order to drain this node.

    The worker ends with the first commit after which other nodes hold everything that it holds.
    """


class CheckpointSettled(Tagged, frozen=True, kw_only=True):
    """The store's answer: the checkpoint of `step` is the newest one, or must stay invisible because of `problem`."""

    step: int
    problem: str


class WriteLast(Tagged, frozen=True, kw_only=True):
    """An order to make the next committed step the last checkpoint, because the job is about to be stopped."""


class Refused(Tagged, frozen=True, kw_only=True):
    """Refusal of this worker. The reason names the setting that differs."""

    reason: str


class Stop(Tagged, frozen=True, kw_only=True):
    """An order to end, because the job was ended from outside or for the given reason."""

    reason: str


ToWorker: TypeAlias = (
    NewView | FirstCommitAllowed | EndReached | ArmFault | Drain | CheckpointSettled | WriteLast | Refused | Stop
)
TO_WORKER: LineCodec[ToWorker] = LineCodec(ToWorker)
