"""The parts of one member, wired: who may ask whom can be read off the constructors, and goes one way only."""

from __future__ import annotations

from elastrain.checkpoint import CheckpointPlan
from elastrain.member.checkpointing import Checkpointing
from elastrain.member.commands import Commands
from elastrain.member.commit import Commit
from elastrain.member.custody import Custody
from elastrain.member.job_end import JobEnd
from elastrain.member.loop_feed import LoopFeed
from elastrain.member.open_step import OpenStep
from elastrain.member.replicas import Replicas
from elastrain.member.views import Views
from elastrain.values import Shape


class Machine:
    """One member's parts. Only `Lifecycle`, `Committing` and `Recovering` see them all."""

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
        self.loop = LoopFeed(self.views, self.commit, self.step, self.out)
        self.end = JobEnd(me, self.views, self.out)

    def held_elsewhere(self) -> dict[int, frozenset[str]] | None:
        """Which members on other nodes hold what this one holds; None while views change: who lives is not known."""
        return None if self.views.is_recovering else self.commit.roles.elsewhere(self.views.view.nodes)
