"""What a worker and its agent say to each other, in both directions. Both ends import these kinds; nobody spells one.

A message is one line of JSON over the worker's channel (`FROM_WORKER`, `TO_WORKER`). Values only: what follows from a
message is decided by the agent's core and by the worker's lifecycle.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from elastrain.job.world import View
from elastrain.protocol.codec import LineCodec, Tagged


class Hello(Tagged, frozen=True, kw_only=True):
    """The worker is ready to join: its model is built, its mesh listens. Its beacon's descriptor travels beside."""

    member: str
    address: str
    """Where its mesh listens."""
    spec: dict[str, Any]
    """What all members must have in common; see `Settings.describe`."""
    # Values and not a digest, so that a refusal can name the setting and both values.


class Suspect(Tagged, frozen=True, kw_only=True):
    """The worker cannot reach `member`. `dead`: the other's process has ended, its robust mutex proves it."""

    member: str
    reason: str
    # A proof needs no second voice; without one the agents wait whether others see it, too.
    dead: bool = False
    generation: int = 0
    """Of the view in which it could not."""
    link_lost: bool = False
    """Their connection broke, or never came about: it may come about again."""


class StepAnew(Tagged, frozen=True, kw_only=True):
    """The worker has found something wrong in the open step: a view is wanted in which that begins anew."""

    generation: int
    """Of the view in which it was found: one that began anew later needs no other."""
    reason: str


class Reading(Tagged, frozen=True, kw_only=True):
    """The worker has read so much of what it needs of the checkpoint that the job starts from; told now and then."""

    done_bytes: int
    size_bytes: int


class FirstCommitDue(Tagged, frozen=True, kw_only=True):
    """All have voted for the first commit of the job. Answer: `FirstCommitAllowed`."""

    # Not before the store knows: others could take this node for dead, and begin the job from its initial state.


class Progress(Tagged, frozen=True, kw_only=True):
    """The worker has passed the commit of `step`."""

    step: int
    loss: float | None = None
    """Weighted mean over the global batch; None where it is not a number."""
    # JSON has no NaN, and an operator's screen has a dash for it.
    samples: int | None = None
    micro_batch_s: float | None = None
    """How long a micro-batch took this worker, in the median; None if it computed none."""
    holders: dict[str, tuple[str, ...]] | None = None
    """Shard -> its primary, then its backups; sent only when they have changed."""
    # Large jobs have thousands of shards, and their holders stay the same for most steps.


class Window(Tagged, frozen=True, kw_only=True):
    """Which shards have fewer living holders than they should; told when that has changed."""

    step: int
    """The step that is open."""
    short: dict[str, int]
    """Shard -> how many living holders it has. Empty: all have as many as they should."""
    since_step: int | None = None
    """The step that was open when the first of them became short of holders."""


class Redone(Tagged, frozen=True, kw_only=True):
    """After a loss pipelines compute something of the open step once more; all members of the view tell the same."""

    generation: int
    """Of the view without the lost members."""
    step: int
    pairs: int
    """How many (block, run) pairs."""


class Failed(Tagged, frozen=True, kw_only=True):
    """The user's script has raised; the worker ends after this."""

    step: int
    # None where the script raised outside of any micro-batch.
    micro_batch: int | None
    signature: str
    """Type and text of the exception: two members with one signature at one place failed for one reason."""
    traceback: str


class LostState(Tagged, frozen=True, kw_only=True):
    """No living member holds the state of some shard."""

    # A sentence and no list of shards: which they are matters to people only.
    sentence: str


class Diverged(Tagged, frozen=True, kw_only=True):
    """Two members differ where they must be equal, and no replacement could mend it: going on would keep wrong bits."""

    sentence: str


class NoRoom(Tagged, frozen=True, kw_only=True):
    """The present plan does not fit this worker's memory limit; the sentence says how much is missing."""

    sentence: str


class Finished(Tagged, frozen=True, kw_only=True):
    """The worker has passed the end of the job, before `step`, with parameters of this digest."""

    step: int
    digest: str
    """Empty where its memory limit left no room for all of them."""
    raised: bool = False
    """Its script was leaving the loop by an exception, which the script may still catch."""


class Struck(Tagged, frozen=True, kw_only=True):
    """A fault on request: the worker has come to where its agent is to act."""

    # Only the agent can kill a whole node, say: all its workers, and then itself.
    number: int


class CheckpointReady(Tagged, frozen=True, kw_only=True):
    """All parts of the checkpoint of `step` are written: may it become visible? Answer: `CheckpointSettled`."""

    # The store decides and not the member: one that was left out, and does not know it, must not overtake the job.
    step: int
    name: str
    size_bytes: int


class CheckpointEnded(Tagged, frozen=True, kw_only=True):
    """The checkpoint of `step` is visible, or given up for this reason; told by the member of lowest rank."""

    step: int
    size_bytes: int = 0
    took_s: float = 0.0
    reason: str = ""
    last: bool = False
    """The job was to be stopped with it."""


class Note(Tagged, frozen=True, kw_only=True):
    """A line for the run's event log; the fields are the worker's own."""

    fields: dict[str, Any]


FromWorker: TypeAlias = (
    Hello
    | Reading
    | Suspect
    | StepAnew
    | FirstCommitDue
    | Progress
    | Window
    | Redone
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
    """This view stands in the store. Members that it leaves out are told, too: so they learn that they have to end."""

    # Whole, and not what has changed: a worker may have missed any number of them.
    view: View


class FirstCommitAllowed(Tagged, frozen=True, kw_only=True):
    """The store knows that the first commit is due: nobody begins the job anew beside it."""


class EndReached(Tagged, frozen=True, kw_only=True):
    """A member has passed the end of the job: from now on nobody waits for anybody."""


class ArmFault(Tagged, frozen=True, kw_only=True):
    """A fault on request: strike at this step and phase, or at the first that comes where one of them is None."""

    kind: str
    step: int | None
    phase: str | None
    for_s: float | None = None
    """How long it lasts; None: for ever, or no time at all."""
    options: dict[str, str | int | float] = {}  # noqa: RUF012 - msgspec copies it for each value
    number: int | None = None
    """Where the agent has to act: to be told by this number that the worker is there."""


class HandOver(Tagged, frozen=True, kw_only=True):
    """This node is to leave while others go on: the worker ends with the first commit after which another node has all
    that it holds.
    """


class CheckpointSettled(Tagged, frozen=True, kw_only=True):
    """The store names the checkpoint of `step` as the newest; or it may not become visible, for this problem."""

    step: int
    problem: str


class WriteLast(Tagged, frozen=True, kw_only=True):
    """The job is about to be stopped: the next step that is committed becomes the last checkpoint."""


class Refused(Tagged, frozen=True, kw_only=True):
    """This worker may not join; the reason names the setting that differs."""

    reason: str


class Stop(Tagged, frozen=True, kw_only=True):
    """The job has ended from outside, or for the reason given: the worker ends."""

    reason: str


ToWorker: TypeAlias = (
    NewView | FirstCommitAllowed | EndReached | ArmFault | HandOver | CheckpointSettled | WriteLast | Refused | Stop
)
TO_WORKER: LineCodec[ToWorker] = LineCodec(ToWorker)
