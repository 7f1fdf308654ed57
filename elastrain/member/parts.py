"""Construction of one member's parts: `Custody`, the parts that keep shards, and `Machine`, all parts together.

A constructor takes the parts that the new part may ask. These dependencies go one way only.
"""

from __future__ import annotations

from elastrain.job.checkpoint_plan import CheckpointPlan
from elastrain.job.values import Shape
from elastrain.member.checkpointing import Checkpointing
from elastrain.member.contract import MemberPart
from elastrain.member.evaluations import Evaluations
from elastrain.member.integrity.comparison import Comparison, DigestBroadcast, SoleCopies
from elastrain.member.integrity.mismatches import Mismatches
from elastrain.member.integrity.repair import Repair
from elastrain.member.job_end import JobEnd
from elastrain.member.loop_stages import LoopStages
from elastrain.member.open_step import OpenStep
from elastrain.member.pipeline.replicas import Replicas
from elastrain.member.pipeline.shadow_feed import ShadowFeed
from elastrain.member.shards.backups import Backups
from elastrain.member.shards.copies import CopiesGiven, CopiesTaken
from elastrain.member.shards.initial_state import InitialState
from elastrain.member.shards.primaries import Primaries
from elastrain.member.shards.state_fetch import StateFetch
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.holdings import Holdings
from elastrain.member.state.member_views import Views


class Custody:
    """Parts that keep shards: primary, backup, sender and receiver of copies, and comparison.

    All share one `Holdings`.
    """

    def __init__(self, me: str, shape: Shape, views: Views, commit: Commit, step: OpenStep, out: Commands) -> None:
        # All parts share one set of states: when a backup becomes the primary, its state stays in place.
        self.holdings = Holdings(out)
        self.initial = InitialState(me, shape.initial, commit, self.holdings, out)
        self.repair = Repair(views, commit, self.holdings, out)
        self.comparison = Comparison(me, views, commit, self.repair, out)
        self.mismatches = Mismatches(views, commit, self.holdings, self.comparison, self.repair, out)
        self.primaries = Primaries(commit, self.holdings, self.comparison, out)
        self.backups = Backups(commit, step.runs, self.holdings, self.primaries, self.mismatches, out)
        self.given = CopiesGiven(shape, views, commit, self.holdings, step, out)
        self.taken = CopiesTaken(me, commit, step.ballot, self.holdings, self.repair, out)
        self.sole_copies = SoleCopies(me, views, commit, self.holdings, self.comparison, shape)
        self.digest_broadcast = DigestBroadcast(views, commit, self.holdings, self.comparison, self.repair, out)

        self.parts: tuple[MemberPart, ...] = (
            self.comparison,
            self.holdings,
            self.initial,
            self.mismatches,
            self.primaries,
            self.backups,
            self.given,
            self.taken,
            self.sole_copies,
            self.digest_broadcast,
            StateFetch(shape.sizes, views, commit, self.holdings, out),
        )


class Machine:
    """All parts of one member. Only `MemberMachine` and the rules (`Committing`, `Recovering`, ...) see them all."""

    def __init__(self, me: str, shape: Shape, checkpoints: CheckpointPlan) -> None:
        self.shape = shape
        # The order follows from the constructors: each part takes the parts that it asks.
        self.out = Commands()
        self.views = Views(me, self.out)
        self.commit = Commit(me, shape)
        self.step = OpenStep(me, shape, self.views, self.commit, self.out)
        self.custody = Custody(me, shape, self.views, self.commit, self.step, self.out)
        self.replicas = Replicas(me, shape, self.commit, self.step.tracing, self.custody.holdings, self.out)
        self.shadow_feed = ShadowFeed(shape, self.views, self.commit, self.replicas, self.step.ballot, self.out)
        self.checkpointing = Checkpointing(
            checkpoints, shape.sizes, self.views, self.commit, self.custody.holdings, self.out
        )
        self.end = JobEnd(me, self.views, self.out)
        self.loop = LoopStages(self.views, self.commit, self.step, self.replicas, self.end, self.out)
        # After a change of view the parts go on in this order. The repair comes last, since another part may find
        # faults.
        self.parts: tuple[MemberPart, ...] = (
            self.views,
            self.commit,
            self.step,
            *self.step.parts,
            *self.custody.parts,
            self.replicas,
            self.shadow_feed,
            self.checkpointing,
            Evaluations(self.views, self.commit, self.loop, self.replicas, self.out),
            self.loop,
            self.end,
            self.custody.repair,
        )

    @property
    def me(self) -> str:
        """Name of this member."""
        return self.views.me

    def begin(self, step: int) -> None:
        """Begin step `step` in all parts."""
        for part in self.parts:
            part.begin(step)

    def held_elsewhere(self) -> dict[int, frozenset[str]] | None:
        """Return shard -> its holders on other nodes, for each shard held here.

        None while a change of view is under way.
        """
        return None if self.views.is_recovering else self.commit.roles.elsewhere(self.views.view.nodes)
