"""The shards in this member's custody: the states themselves, and the four things that it does with them."""

from __future__ import annotations

from elastrain import protocol as p
from elastrain.member.announcements import Announcements
from elastrain.member.backups import Backups
from elastrain.member.commands import Commands
from elastrain.member.commit import Commit
from elastrain.member.comparison import Comparison
from elastrain.member.copies import CopiesGiven, CopiesTaken
from elastrain.member.doubts import Doubts
from elastrain.member.holdings import Holdings
from elastrain.member.initial_state import InitialState
from elastrain.member.lone import LoneStates
from elastrain.member.open_step import OpenStep
from elastrain.member.primaries import Primaries
from elastrain.member.repair import Repair
from elastrain.member.views import Views
from elastrain.messages import Evidence
from elastrain.values import Shape


class Custody:
    """Primary, backup, giver and taker of copies, and witness: parts that share one `Holdings`."""

    def __init__(self, me: str, shape: Shape, views: Views, commit: Commit, step: OpenStep, out: Commands) -> None:
        # One set of states for all: a shard that was a backup's becomes a primary's where it lies.
        self.holdings = Holdings(out)
        self.initial = InitialState(me, shape.initial, commit, self.holdings, out)
        self.repair = Repair(views, commit, self.holdings, out)
        self.comparison = Comparison(me, views, commit, self.repair, out)
        self.doubts = Doubts(views, commit, self.holdings, self.comparison, self.repair, out)
        self.primaries = Primaries(commit, self.holdings, self.comparison, out)
        self.backups = Backups(commit, step.runs, self.holdings, self.primaries, self.doubts, out)
        self.given = CopiesGiven(shape.sizes, views, commit, self.holdings, step.reduction, out)
        self.taken = CopiesTaken(me, commit, self.holdings, self.repair, out)
        self.lone = LoneStates(me, views, commit, self.holdings, self.comparison, shape)
        self.announcements = Announcements(views, commit, self.holdings, self.comparison, self.repair, out)

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

    def on_gradients_kept(self, event: p.GradientsKept) -> None:
        """Of an older step it is the update that shows what is wrong."""
        if self.backups.on_kept(event):
            for shard in event.damaged:
                self.repair.on_gradient_damaged(shard)

    def on_evidence(self, source: str, message: Evidence) -> None:
        """Hand the answer to whoever asked: of parameters, of a broken copy, or of a backup's update."""
        # A broken copy before a doubt: while it is not taken, this member has no state to have doubts of.
        if message.parameters:
            self.comparison.on_evidence(source, message.shard, message.digest)
        elif self.taken.is_about(message.shard):
            self.taken.on_evidence(source, message)
        else:
            self.doubts.on_evidence(source, message)
