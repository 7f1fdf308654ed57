"""The parts of one member, wired: who may ask whom can be read off the constructors, and goes one way only.

The shards in this member's custody: the states themselves, and the four things that it does with them.
"""

from __future__ import annotations

from elastrain import protocol as p
from elastrain.job.checkpoint_plan import CheckpointPlan
from elastrain.job.values import Shape
from elastrain.member.checkpointing import Checkpointing
from elastrain.member.contract import Part, handles
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
from elastrain.protocol.messages import Digests, Evidence


class Custody(Part):
    """Primary, backup, giver and taker of copies, and witness: parts that share one `Holdings`."""

    def __init__(self, me: str, shape: Shape, views: Views, commit: Commit, step: OpenStep, out: Commands) -> None:
        self._shape, self._views, self._commit, self._step = shape, views, commit, step
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

        self.parts: tuple[Part, ...] = (
            self.holdings,
            self.initial,
            self.comparison,
            self.doubts,
            self.primaries,
            self.backups,
            self.given,
            self.taken,
            self.lone,
            self.announcements,
        )

    def forget_view(self) -> None:
        """Whatever was asked, told or under way between members of the last view is void."""
        # Answers of members that are gone never come: whatever waited for one would wait for ever.
        self.holdings.forget_view()
        self.comparison.forget_told()
        self.primaries.forget_view()
        self.lone.forget_look()
        self.given.forget_view()
        self.taken.forget_broken()
        self.announcements.forget_view()

    def forget_step(self) -> None:
        """Another step is committed: what was told of the states and parameters of the last one is void."""
        self.comparison.forget_told()
        self.lone.forget_look()
        self.given.begin_step()
        self.taken.forget_broken()
        self.repair.forget_step()

    @handles(p.GradientsFinished)
    def on_gradients_finished(self, event: p.GradientsFinished) -> None:
        """Note finished gradients, and have the step begun anew if one of their lanes has changed."""
        self._step.reduction.on_finished(event)
        if event.step == self._step.number:
            self.repair.on_lanes_damaged(event.damaged)

    @handles(p.PartialDamaged)
    def on_partial_damaged(self, event: p.PartialDamaged) -> None:
        """Have the step begun anew, because a partial differs from what its maker had."""
        if event.step == self._step.number:
            self._step.reduction.on_damaged(event)
            self.repair.on_damaged(event, self._shape.shards[event.shard].lanes[event.lane])

    @handles(p.TookCopy)
    def on_took_copy(self, event: p.TookCopy) -> None:
        """Note a copy that was taken, unless a recovery is about to decide anew which members get copies."""
        if not self._views.is_recovering:
            self.taken.on_taken(event)

    @handles(Digests)
    def on_digests(self, source: str, message: Digests) -> None:
        """Note a primary's digests: of published parameters, and of states for its backups."""
        if message.step == self._commit.step:
            self.comparison.tell(source, message.parameters)
        self.backups.on_digests(source, message)

    @handles(p.GradientsKept)
    def on_gradients_kept(self, event: p.GradientsKept) -> None:
        """Acknowledge intact gradients of the open step, and have the step begun anew for damaged ones.

        Damage to a gradient of an older step is detected by comparing the update instead.
        """
        if self.backups.on_kept(event):
            for shard in event.damaged:
                self.repair.on_gradient_damaged(shard)

    @handles(Evidence)
    def on_evidence(self, source: str, message: Evidence) -> None:
        """Hand the answer to the part that has asked: about parameters, a broken copy, or a backup's update."""
        if message.step != self._commit.step:
            return
        # A broken copy before a doubt: while it is not taken, this member has no state to have doubts of.
        if message.parameters:
            self.comparison.on_evidence(source, message.shard, message.digest)
        elif self.taken.is_about(message.shard):
            self.taken.on_evidence(source, message)
        else:
            self.doubts.on_evidence(source, message)


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
        self.parts: tuple[Part, ...] = (
            self.views,
            self.commit,
            *(self.step, *self.step.parts),
            *(self.custody, *self.custody.parts),
            self.replicas,
            self.checkpointing,
            self.loop,
            self.end,
            self.custody.repair,
        )

    def held_elsewhere(self) -> dict[int, frozenset[str]] | None:
        """Which members on other nodes hold what this one holds; None while views change: who lives is not known."""
        return None if self.views.is_recovering else self.commit.roles.elsewhere(self.views.view.nodes)
