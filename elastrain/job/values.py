"""Values that the decisions about a step take and return: the logical job, and what members know and agree on.

Frozen, and below everything else: `recovery`, `voting` and the member's machine decide over them, `messages` carries
some of them between members. Nothing here decides anything, and no wire format is known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastrain.job.checkpoint_plan import Checkpointed, Wish
from elastrain.job.fold import Node
from elastrain.job.placement import Holders, Placement
from elastrain.job.scaling import NO_SCALE, UNSCALED, LossScale, Scaler
from elastrain.pipeline.graph import BlockGraph
from elastrain.pipeline.open_tasks import TaskProgress
from elastrain.pipeline.pipeline_plan import BoundaryName, PipelinePlan


@dataclass(frozen=True, kw_only=True)
class ShardShape:
    """A shard as the protocol sees it: its bytes, and the block of each of its gradient lanes."""

    size_bytes: int
    # Several blocks where they share a weight: each block's gradient is folded alone, then all are added in this order.
    lanes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Initial:
    """What the job starts from: parameters that the scripts make, or a checkpoint."""

    step: int = -1
    """The step after which the initial state stands; -1: none was made yet."""
    is_stored: bool = False
    """Every member reads it for itself. Else one member's parameters become everybody's."""
    scaler: Scaler | None = None
    """The loss scaling of the first step; None: as the rule begins."""


@dataclass(frozen=True, kw_only=True)
class AuditPlan:
    """Which runs a second member computes, too."""

    every: int = 0
    """In every so many steps; 0: none is."""
    is_of_all: bool = False
    """All runs of such a step, else one, drawn from the seed."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Pipelining:
    """The job computes in pipelines, and what it takes to cut a step into tasks."""

    stages: int
    """Members per pipeline, as asked for; at least 2."""
    micro_batches: int
    """Of one step."""
    run_length: int
    """Micro-batches of a run; the last run may have fewer."""


@dataclass(frozen=True, kw_only=True)
class TracedGraph:
    """What a member's tracing pass has found. It is the same on all members, or they are not of one job."""

    graph: BlockGraph
    # Layout blocks own parameters and graph blocks are entered by a forward: neither list is a part of the other.
    places: tuple[int, ...]
    """Per block of the layout, the place in the graph that it is computed with."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The logical job as the protocol sees it; fixed for its whole life."""

    # No tensors, and no names but for people: so the simulator can play the job of any model.

    runs: int
    blocks: int
    shards: tuple[ShardShape, ...]
    backups: int
    loss_scale: LossScale = UNSCALED
    deterministic: bool = True
    """Whether a run that is computed again gives the same bits."""
    cross_check_every: int = 0
    """Members check each other in every so many steps, besides the first one; 0: in that one only."""
    audit: AuditPlan = AuditPlan()
    block_names: tuple[str, ...] = ()
    """For people."""
    initial: Initial = Initial()
    pipelining: Pipelining | None = None
    """None: every member computes whole runs."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(shard.size_bytes for shard in self.shards)


@dataclass(frozen=True)
class Contribution:
    """What a partial stands for besides its gradient; folded with it, along the same tree."""

    loss: float = 0.0
    """Sum of weight × loss."""
    # A sum and not a mean, because means of unequal shares cannot be put together: it is divided once, by the record.
    weight: float = 0.0
    samples: int = 0
    fingerprint: int = 0
    """Sum modulo 2**64 of a mix of each sample's number: proves which samples are in, whoever computed them."""

    # Losses are floats, so the order counts: callers add along the tree, the left child first.
    def __add__(self, other: Contribution) -> Contribution:
        return Contribution(
            self.loss + other.loss,
            self.weight + other.weight,
            self.samples + other.samples,
            (self.fingerprint + other.fingerprint) % (1 << 64),
        )


@dataclass(frozen=True, kw_only=True)
class Check:
    """What one member has computed from the first micro-batch of a run to `micro_batch`, for comparison."""

    micro_batch: int
    loss: float
    """Sum of weight × loss."""
    weight: float
    digests: tuple[int, ...]
    """Per block, of its summed gradients (and running statistics)."""
    kept: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Names of what forwards change in the model beside running statistics, for the sentence about other results."""


@dataclass(frozen=True, order=True)
class Accusation:
    """Audits have shown a member's gradient to be wrong, by votes of one generation."""

    generation: int
    member: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What comparisons of members' results have shown."""

    warning: str = ""
    """Where members that need not be deterministic differ."""
    accused: tuple[Accusation, ...] = ()
    """Members whose gradients audits have found wrong, in earlier attempts at this step."""


@dataclass(frozen=True, kw_only=True)
class Vote:
    """All that a member answers for is finished and backed up."""

    step: int
    seen: int
    """Newest generation that this member has seen."""
    # None where this member is the primary of no shard, and so has folded nothing.
    contribution: Contribution | None
    # By shard, and added only in the record: a sum made here would depend on which shards this member has.
    square_norms: tuple[tuple[int, float], ...]
    # The primary of a shard says who its next holders are, because it knows whose copy is verified.
    roles: tuple[tuple[int, Holders], ...]
    settings: str
    """JSON, name -> digest of hyperparameters, layers, registered state: who differs there must not go on with us."""
    checks: tuple[Check, ...]
    """Micro-batches that this member and another one compute, if any in this step."""
    # Whoever was wrong then may be the only one who still knows what it told.
    before: tuple[Check, ...]
    """Its checks in an earlier vote for this step, with audits."""
    checkpoint: Wish
    """Whether this step should become a durable checkpoint."""
    writing: bool
    """This member has part in a checkpoint that is not complete yet."""
    graph: str
    """Digest of the block graph that this member has traced; empty without pipelines."""
    # One member's word, so that planning need not come out alike everywhere: the first of the view proposes it.
    plan: PipelinePlan | None
    """Who is to compute which blocks from the next step on."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The commit record: a member that holds it has passed the commit of `step`."""

    # It travels with everything that follows from the commit, so that learning of the commit and passing it are one.

    step: int
    generation: int
    contribution: Contribution
    square_norm: float
    """Of the summed gradient, before division by the weight; shards added in index order."""
    # NaN or overflow: number and samples advance for all, parameters, moments and schedules for nobody.
    skipped: bool
    switch: bool
    """Every member has seen a newer view: the next step is computed there."""
    roles: tuple[tuple[int, Holders], ...] = ()
    scaler: Scaler = NO_SCALE
    """The loss scaling of this step: its gradients carry it until they are applied."""
    next_scaler: Scaler = NO_SCALE
    """That of the next step, for everyone alike."""
    findings: Findings = Findings()
    checkpoint: Checkpointed = Checkpointed.NO
    """Whether this step becomes a durable checkpoint."""
    plan: PipelinePlan | None = None
    """Who computes which blocks from the next step on. None: every member computes whole runs."""


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """What a member knows to be wrong of the open step."""

    parameters: tuple[tuple[int, str], ...]
    """Shards whose committed parameters all are to take again, each with the holder whose state is wrong, if any."""
    # Whoever was wrong may not have got the votes that show it: others went on to this view before.
    accused: tuple[Accusation, ...]
    """What votes have shown to this member."""


@dataclass(frozen=True, kw_only=True)
class OpenWork:
    """What a member has still to compute of step `committed + 1`."""

    pending: tuple[int, ...] = ()
    """Runs still to do here, the running one first."""
    fixed: int = 0
    """How many of `pending` may already be under way and cannot be taken away."""
    # Told again in each view, because a newcomer decides with the others, and has not traced anything yet.
    traced: TracedGraph | None = None
    """None without pipelines, and until this member's tracing pass is over: it may be given no task before."""
    tasks: tuple[TaskProgress, ...] = ()
    """Tasks of pipelines with something left to compute here."""
    kept: tuple[BoundaryName, ...] = ()
    """Boundary tensors that this member has made or received."""
    adopted: tuple[int, ...] = ()
    """Blocks of the graph of which a recovery of this step has made this member a replica."""
    plan: PipelinePlan | None = None
    """Of the job's first step, if it is in force here; later ones are in the record."""
    present: tuple[int, ...] = ()
    """Blocks of the layout whose parameters lie in this member's memory until the next commit."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Where a member stands when a view begins, after it has stopped reading anything of older generations."""

    # Everything that the decision depends on is in here: members that have the same reports decide alike.

    committed: int
    record: Record | None
    base: Placement | None
    """Holders as of `committed`; None before the first recovery."""
    parameters: tuple[int, ...]
    """Per shard, the step whose parameters the model holds; below `committed` where they have not arrived."""
    held: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(shard, verified version, steps of the kept gradients)."""
    # An unverified update is no state to go on from: only the version that was compared counts.
    begun: int
    """Newest step that the training loop has entered; -1 for a newcomer."""
    # At the end of the job parameters alone count: members that leave in peace take their shards along.
    finishing: bool
    work: OpenWork
    own: tuple[tuple[Node, ...], ...]
    """Per block, the partials of step `committed + 1` that this member has computed."""
    folded: tuple[tuple[int, int, tuple[Node, ...]], ...]
    """(shard, lane, partials that this primary has)."""
    # By one member's word alone: who computed with wrong parameters knows it, and the others have its sums.
    wrong: Wrong | None
    """Something of step `committed + 1` was wrong, so that nothing of it counts. None: nothing is known to be."""
    keeps_own: bool = False
    """Its training loop has ended, and its memory limit leaves no room for the blocks of others."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Complete the highest committed step, then resume the attempt of the next one."""

    committed: int
    record: Record | None
    # The holders that the record made; `now` are those of them that live and can serve.
    base: Placement
    now: tuple[Holders, ...]
    source: str | None
    """Before the first commit: the member whose initial parameters are everybody's; None where they are stored."""
    lacking: Mapping[str, tuple[int, ...]]
    """Per member, the shards whose parameters of `committed` it does not have."""
    newcomers: tuple[str, ...]
    """Members whose training loop needs the loop state of the others, from the `donor`."""
    runs: Mapping[str, tuple[int, ...]]
    """Per member, the runs to do, those under way first."""
    redone: int
    """How many runs were handed out again."""
    folded: Mapping[tuple[int, int], frozenset[Node]]
    """(shard, lane) -> what its primary has."""
    reason: str
    wrong: tuple[tuple[int, str], ...] | None = None
    """The open step begins anew, whatever was computed of it; see `Wrong.parameters`. None: it goes on."""

    @property
    def distrusted(self) -> frozenset[int]:
        """Shards whose parameters all take again."""
        return frozenset(shard for shard, _ in self.wrong or ())

    @property
    def donor(self) -> str | None:
        """The first member that is no newcomer: it hands the loop's state on. None where there is no newcomer."""
        return next((m for m in self.runs if m not in self.newcomers), None) if self.newcomers else None


@dataclass(frozen=True, kw_only=True)
class Unrecoverable:
    """No member of the view can answer for these shards."""

    shards: tuple[int, ...]
    reason: str
