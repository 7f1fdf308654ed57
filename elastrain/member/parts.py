"""The parts of one member, wired: who may ask whom can be read off the constructors, and goes one way only.

The shards in this member's custody: the states themselves, and the four things that it does with them.
"""

from __future__ import annotations

from elastrain.job.checkpoint_plan import CheckpointPlan
from elastrain.job.values import Shape
from elastrain.member.checkpointing import Checkpointing
from elastrain.member.contract import MemberPart
from elastrain.member.integrity.comparison import Comparison, DigestBroadcast, SoleCopies
from elastrain.member.integrity.mismatches import Mismatches
from elastrain.member.integrity.repair import Repair
from elastrain.member.job_end import JobEnd
from elastrain.member.loop_stages import LoopStages
from elastrain.member.open_step import OpenStep
from elastrain.member.pipeline.replicas import Replicas
from elastrain.member.shards.backups import Backups
from elastrain.member.shards.copies import CopiesGiven, CopiesTaken
from elastrain.member.shards.initial_state import InitialState
from elastrain.member.shards.primaries import Primaries
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.holdings import Holdings
from elastrain.member.state.member_views import Views


class Custody:
    """Primary, backup, giver and taker of copies, and witness: parts that share one `Holdings`."""

    def __init__(self, me: str, shape: Shape, views: Views, commit: Commit, step: OpenStep, out: Commands) -> None:
        # One set of states for all: a shard that was a backup's becomes a primary's where it lies.
        self.holdings = Holdings(out)
        self.initial = InitialState(me, shape.initial, commit, self.holdings, out)
        self.repair = Repair(views, commit, self.holdings, out)
        self.comparison = Comparison(me, views, commit, self.repair, out)
        self.doubts = Mismatches(views, commit, self.holdings, self.comparison, self.repair, out)
        self.primaries = Primaries(commit, self.holdings, self.comparison, out)
        self.backups = Backups(commit, step.runs, self.holdings, self.primaries, self.doubts, out)
        self.given = CopiesGiven(shape.sizes, views, commit, self.holdings, step.reduction, out)
        self.taken = CopiesTaken(me, commit, self.holdings, self.repair, out)
        self.lone = SoleCopies(me, views, commit, self.holdings, self.comparison, shape)
        self.announcements = DigestBroadcast(views, commit, self.holdings, self.comparison, self.repair, out)

        self.parts: tuple[MemberPart, ...] = (
            self.comparison,
            self.holdings,
            self.initial,
            self.doubts,
            self.primaries,
            self.backups,
            self.given,
            self.taken,
            self.lone,
            self.announcements,
        )


class Machine:
    """One member's parts. Only `MemberMachine`, `Committing` and `Recovering` see them all."""

    def __init__(self, me: str, shape: Shape, checkpoints: CheckpointPlan) -> None:
        self.me = me
        self.shape = shape
        # In this order: each part is given those that it asks, and none that asks it.
        self.out = Commands()
        self.views = Views(me, self.out)
        self.commit = Commit(me, shape)
        self.step = OpenStep(me, shape, self.views, self.commit, self.out)
        self.custody = Custody(me, shape, self.views, self.commit, self.step, self.out)
        self.replicas = Replicas(me, shape, self.commit, self.step.tracing, self.custody.holdings, self.out)
        self.checkpointing = Checkpointing(
            checkpoints, shape.sizes, self.views, self.commit, self.custody.holdings, self.out
        )
        self.loop = LoopStages(self.views, self.commit, self.step, self.out)
        self.end = JobEnd(me, self.views, self.out)
        # After a change of view they go on in this order: the repair comes last, since a part may find faults.
        self.parts: tuple[MemberPart, ...] = (
            self.views,
            self.commit,
            *self.step.parts,
            *self.custody.parts,
            self.replicas,
            self.checkpointing,
            self.loop,
            self.end,
            self.custody.repair,
        )

    def begin(self, step: int) -> None:
        """Begin with another step in all parts."""
        for part in self.parts:
            part.begin(step)

    def held_elsewhere(self) -> dict[int, frozenset[str]] | None:
        """Which members on other nodes hold what this one holds; None while views change: who lives is not known."""
        return None if self.views.is_recovering else self.commit.roles.elsewhere(self.views.view.nodes)
