"""Values that the decisions about a step take and return: the logical job, and what members know and agree on.

Frozen and without logic. `recovery`, `voting` and the member's machine decide with them, and `messages` sends some of
them between members. No wire format is known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastrain.job.checkpoint_plan import Checkpointed, CheckpointVote
from elastrain.job.fold import Node
from elastrain.job.placement import Holders, Placement
from elastrain.job.scaling import NO_SCALE, UNSCALED, LossScale, Scaler
from elastrain.job.streams import StreamMark
from elastrain.pipeline.graph import BlockGraph
from elastrain.pipeline.open_tasks import TaskProgress
from elastrain.pipeline.pipeline_plan import BoundaryName, PipelinePlan
from elastrain.pipeline.planner.plan_vote import PlanVote


@dataclass(frozen=True, kw_only=True)
class ShardShape:
    """A shard as the protocol sees it: its bytes, and the block of each of its gradient lanes."""

    size_bytes: int
    # Several blocks if they share a weight: each block's gradient is folded alone, then all are added in this order.
    lanes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Initial:
    """The state that the job starts from: parameters that the scripts make, or a checkpoint."""

    step: int = -1
    """The step after which the initial state stands; -1: before the first step."""
    is_stored: bool = False
    """True if every member reads it for itself. Else all take the parameters of one member."""
    scaler: Scaler | None = None
    """Loss scaling of the first step; None: the rule's own start."""


@dataclass(frozen=True, kw_only=True)
class AuditPlan:
    """Choice of the runs that a second member also computes."""

    every: int = 0
    """Steps between two audited steps; 0: no audits."""
    is_of_all: bool = False
    """True: all runs of an audited step. False: one run, drawn from the seed."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Pipelining:
    """Settings of a job that computes in pipelines. They say how a step is cut into tasks."""

    stages: int
    """Members per pipeline, as requested; at least 2. 0: as few as have room in memory (`--stages auto`)."""
    micro_batches: int
    """Micro-batches of one step."""
    run_length: int
    """Micro-batches of a run; the last run may have fewer."""
    has_standing: bool = False
    """True if plans keep standing shadows where members have room."""


@dataclass(frozen=True, kw_only=True)
class TracedGraph:
    """Result of a member's tracing pass. Graph and places are the same on all members of a job."""

    graph: BlockGraph
    places: tuple[int, ...]
    """Per block of the layout (these own parameters), the block of the graph (these are entered) that it goes with."""
    fewest: int = 1
    """With `--stages auto`: the fewest members per pipeline for which the member that has traced has room."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The logical job as the protocol sees it, without tensors; fixed for its whole life."""

    runs: int
    blocks: int
    shards: tuple[ShardShape, ...]
    backups: int
    loss_scale: LossScale = UNSCALED
    deterministic: bool = True
    """True if a run that is computed again gives the same bits."""
    cross_check_every: int = 0
    """Steps between two cross-checks of members, besides the one in the first step; 0: only that one."""
    audit: AuditPlan = AuditPlan()
    block_names: tuple[str, ...] = ()
    """Names for messages to people."""
    initial: Initial = Initial()
    pipelining: Pipelining | None = None
    """None: every member computes whole runs."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each shard."""
        return tuple(shard.size_bytes for shard in self.shards)


Sums = tuple[tuple[str, float], ...]
"""Figures that a script adds up over a step, as (name, sum), sorted by name."""


@dataclass(frozen=True)
class Contribution:
    """Loss, weight, sample count, fingerprint and figures of a partial, added along the same tree as its gradient."""

    loss: float = 0.0
    """Sum of weight × loss."""
    # A sum and not a mean, because means of unequal shares cannot be combined. The record divides once.
    weight: float = 0.0
    samples: int = 0
    fingerprint: int = 0
    """Sum modulo 2**64 of a hash of each sample's number.

    It proves which samples are included, whichever members computed them.
    """
    sums: Sums = ()

    # Losses are floats, so the order counts: callers add along the tree, the left child first.
    def __add__(self, other: Contribution) -> Contribution:
        return Contribution(
            self.loss + other.loss,
            self.weight + other.weight,
            self.samples + other.samples,
            (self.fingerprint + other.fingerprint) % (1 << 64),
            added(self.sums, other.sums),
        )


def added(left: Sums, right: Sums) -> Sums:
    """Add figures by name, the left one first. A name that one side lacks keeps the value of the other side."""
    if not left or not right:
        return left or right
    sums = dict(left)
    for name, value in right:
        sums[name] = sums[name] + value if name in sums else value
    return tuple(sorted(sums.items()))


@dataclass(frozen=True, kw_only=True)
class Check:
    """One member's results from the first micro-batch of a run up to `micro_batch`, for comparison."""

    micro_batch: int
    loss: float
    """Sum of weight × loss."""
    weight: float
    digests: tuple[int, ...]
    """Per block, the digest of its summed gradients (and running statistics)."""
    sums: Sums = ()
    """Figures of the script, added up like the loss."""
    kept: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Names of what forwards change in the model besides running statistics, for messages about differences."""


@dataclass(frozen=True, order=True)
class Accusation:
    """Proof by audits, in votes of one generation, that a member's gradient was wrong."""

    generation: int
    member: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Results of a step besides its update: of comparing checks, of reading streams, and of measuring members."""

    warning: str = ""
    """Message about differing results, if the job need not be deterministic."""
    accused: tuple[Accusation, ...] = ()
    """Members whose gradients audits have found wrong, in earlier attempts at this step."""
    marks: tuple[StreamMark, ...] = ()
    """Marks of streams at the start of the step."""
    speeds: tuple[tuple[str, int], ...] = ()
    """(member, speed), as in `Speeds`: the runs of the next step are handed out by them. Empty with pipelines."""


@dataclass(frozen=True, kw_only=True)
class Vote:
    """A member's message that its part of the step is finished and backed up."""

    step: int
    seen: int
    """Newest generation that this member has seen."""
    # None if this member is the primary of no shard, and so has folded nothing.
    contribution: Contribution | None
    # By shard, and added only in the record: a sum made here would depend on which shards this member has.
    square_norms: tuple[tuple[int, float], ...]
    # The primary of a shard names its next holders, because it knows which copies are verified.
    roles: tuple[tuple[int, Holders], ...]
    settings: str
    """JSON, name -> digest of hyperparameters, layers and registered state. Members must not go on if they differ."""
    checks: tuple[Check, ...]
    """Results for micro-batches that this member and another one both compute, if there are any in this step."""
    # The member that was wrong then may be the only one left that knows what it reported.
    before: tuple[Check, ...]
    """Checks of its earlier vote for this step, with audits."""
    checkpoint: CheckpointVote
    """This member's say about a durable checkpoint of this step."""
    graph: str
    """Digest of the block graph that this member has traced; empty without pipelines."""
    plan: PlanVote | None
    """None if this member has nothing to say about who computes what."""
    marks: tuple[StreamMark, ...] = ()
    """Marks at the start of this step, of the streams that this member has read in it."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The commit record: a member that holds it has passed the commit of `step`."""

    # It travels with everything that follows from the commit, so that a member that learns of the commit also passes
    # it.

    step: int
    generation: int
    contribution: Contribution
    square_norm: float
    """Squared norm of the summed gradient, before division by the weight. Shards are added in index order."""
    # True after NaN or overflow: number and samples advance, but parameters, moments and schedules do not.
    skipped: bool
    switch: bool
    """True if every member has seen a newer view. The next step is computed there."""
    roles: tuple[tuple[int, Holders], ...] = ()
    scaler: Scaler = NO_SCALE
    """Loss scaling of this step. Its gradients carry it until they are applied."""
    next_scaler: Scaler = NO_SCALE
    """Loss scaling of the next step, the same for all members."""
    findings: Findings = Findings()
    checkpoint: Checkpointed = Checkpointed.NO
    """Decision about a durable checkpoint of this step."""
    plan: PipelinePlan | str | None = None
    """Assignment of blocks to members from the next step on, or its digest if it stays. None: no pipelines."""


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """Errors of the open step that a member knows."""

    parameters: tuple[tuple[int, str], ...]
    """Shards whose committed parameters all members receive again, each with the holder of a wrong state, or ""."""
    # A member that was wrong may lack the votes that show it, because the others moved on to this view before.
    accused: tuple[Accusation, ...]
    """Accusations that votes have shown to this member."""


@dataclass(frozen=True, kw_only=True)
class OpenWork:
    """Work of step `committed + 1` that a member still has to compute."""

    pending: tuple[int, ...] = ()
    """Runs still to do here, the running one first."""
    fixed: int = 0
    """Number of runs at the head of `pending` that may be under way and cannot be taken away."""
    # Sent in each view, because a newcomer decides with the others and has not traced anything yet.
    traced: TracedGraph | None = None
    """None without pipelines, and until this member's tracing pass is over. It gets no task before that."""
    tasks: tuple[TaskProgress, ...] = ()
    """Tasks of pipelines with something left to compute here."""
    kept: tuple[BoundaryName, ...] = ()
    """Boundary tensors that this member has made or received."""
    adopted: tuple[int, ...] = ()
    """Blocks of the graph of which a recovery of this step has made this member a replica."""
    plan: PipelinePlan | None = None
    """Plan of the job's first step, if it is in force here. Later plans are in the record."""
    present: tuple[int, ...] = ()
    """Blocks of the layout whose parameters lie in this member's memory until the next commit."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """State of a member at the start of a view, after it has stopped reading messages of older generations."""

    # Everything that the decision depends on is in here: members that have the same reports decide alike.

    committed: int
    record: Record | None
    base: Placement | None
    """Holders as of `committed`; None before the first recovery."""
    parameters: tuple[int, ...]
    """Per shard, the step whose parameters the model holds; below `committed` if they have not arrived yet."""
    held: tuple[tuple[int, int, tuple[int, ...]], ...]
    """Per held shard: (shard, verified version, steps of the kept gradients)."""
    # Only the compared version counts: no member may continue from an unverified update.
    begun: int
    """Newest step that the training loop has entered; -1 for a newcomer."""
    # At the end of the job parameters alone count: members that leave regularly take their shards with them.
    finishing: bool
    work: OpenWork
    own: tuple[tuple[Node, ...], ...]
    """Per block, the partials of step `committed + 1` that this member has computed."""
    folded: tuple[tuple[int, int, tuple[Node, ...]], ...]
    """(shard, lane, partials that this primary has)."""
    # One member's report is enough: a member that computed with wrong parameters knows it, and others have its sums.
    wrong: Wrong | None
    """Errors that make all results of step `committed + 1` void. None: no error is known."""
    keeps_own: bool = False
    """True if its training loop has ended, and its memory limit leaves no room for other members' blocks."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The decision of a new view: complete the highest committed step, then resume the next one."""

    committed: int
    record: Record | None
    # The holders that the record made; `now` has those that are alive and can serve.
    base: Placement
    now: tuple[Holders, ...]
    source: str | None
    """Member whose initial parameters all take, before the first commit. None if they are stored."""
    lacking: Mapping[str, tuple[int, ...]]
    """Per member, the shards whose parameters of `committed` it does not have."""
    newcomers: tuple[str, ...]
    """Members whose training loop needs the loop state of the `donor`."""
    runs: Mapping[str, tuple[int, ...]]
    """Per member, the runs to do, those under way first."""
    redone: int
    """Number of runs that were handed out again."""
    folded: Mapping[tuple[int, int], frozenset[Node]]
    """(shard, lane) -> partials that its primary has."""
    reason: str
    wrong: tuple[tuple[int, str], ...] | None = None
    """Wrong parameters (see `Wrong.parameters`) if the open step starts again from nothing. None: the step goes on."""

    @property
    def distrusted(self) -> frozenset[int]:
        """Shards whose parameters all members receive again."""
        return frozenset(shard for shard, _ in self.wrong or ())

    @property
    def donor(self) -> str | None:
        """The first member that is not a newcomer; it sends the loop's state. None if there is no newcomer."""
        return next((m for m in self.runs if m not in self.newcomers), None) if self.newcomers else None


@dataclass(frozen=True, kw_only=True)
class Unrecoverable:
    """A failed recovery: no member of the view has the state of these shards, or can make it."""

    shards: tuple[int, ...]
    reason: str
