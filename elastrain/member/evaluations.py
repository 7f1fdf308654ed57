"""Evaluations that all members share, between two steps: `job.evaluate`. A broadcast is one of a single batch.

Each member's loop says that it is in the evaluation. The collector, the first member that is no newcomer, hands out the
batches, adds their figures and sends the result. In a new view all say it again, with the batches that they have
computed, so that another collector can go on. A member that has the result answers with it, so that there is only one.
The only batch of a broadcast goes to the member that is to give its value. With pipelines a batch goes through a chain
of members, each of which computes its blocks; the collector chooses the chains of each view.
"""

from __future__ import annotations

from collections.abc import Mapping

from elastrain import protocol as p
from elastrain.decisions.batch_shares import AHEAD, Shares
from elastrain.job.values import Recovery
from elastrain.member.contract import MemberPart, handles
from elastrain.member.loop_stages import LoopStages
from elastrain.member.own_batches import OwnEvaluation
from elastrain.member.pipeline.replicas import Replicas
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.member_views import Views
from elastrain.pipeline.forward_chains import Chain
from elastrain.pipeline.pipeline_plan import BoundaryName
from elastrain.protocol.evaluation_messages import (
    BatchBoundary,
    BatchFigures,
    BlocksAdopted,
    EvaluateBatches,
    EvaluationName,
    EvaluationResult,
    InEvaluation,
    OutsideEvaluation,
)
from elastrain.protocol.messages import Boundary


class Evaluations(MemberPart):
    """Part that owns the evaluation of this member's loop, and what it knows as a collector."""

    def __init__(self, views: Views, commit: Commit, loop: LoopStages, replicas: Replicas, out: Commands) -> None:
        self._views, self._commit, self._loop, self._replicas, self._out = views, commit, loop, replicas, out
        self._own: OwnEvaluation | None = None
        self._shares: dict[EvaluationName, Shares] = {}
        """Evaluations in which this member is the collector."""
        self._chains: dict[EvaluationName, Mapping[str, Chain]] = {}
        """Evaluation in which this member is the collector -> head of a chain -> the chain, in this view."""
        self._results: dict[EvaluationName, EvaluationResult] = {}
        """Results that another member may still need."""
        self._others: dict[EvaluationName, set[str]] = {}
        """Evaluation without a result here -> members that are in it."""
        self._first: int | None = None
        """First step whose body this member's loop was in."""
        self._begun = -1
        """Newest step whose micro-batches the loop had reached when it was last looked at."""

    # ------------------------------------------------------------------------------------------------------- the loop

    @handles(p.EvaluationBegun)
    def on_begun(self, event: p.EvaluationBegun) -> None:
        """Note that the loop is in an evaluation, and asks for a batch."""
        self._own = OwnEvaluation(begun=event)
        self._first = event.name.step if self._first is None else self._first

    @handles(p.BatchEvaluated)
    def on_evaluated(self, event: p.BatchEvaluated) -> None:
        """Take what the loop has computed. It asks for the next batch."""
        own = self._own
        assert own is not None
        if (piece := own.take(event)) is None:
            # The same may have come from another member in this view.
            # No member was told of it, so its memory may go at once.
            self._drop((event.made.name,) if event.made is not None and event.made.name not in own.kept else ())
            return
        if event.made is not None:
            if piece.then != self._views.me:
                cut, tensors = event.made.name.cut, event.made.tensors
                said = BatchBoundary(name=own.name, batch=piece.batch, cut=cut, tensors=tensors)
                self._out.send(piece.then, said)
            return
        own.finish(piece.batch, event.figures, event.problem)
        if not own.is_announced:
            return  # the notice says it
        told = BatchFigures(name=own.name, batch=piece.batch, figures=event.figures, problem=event.problem)
        if self._collector == self._views.me:
            self.on_figures(self._views.me, told)
        else:
            self._out.send(self._collector, told)

    def _drop(self, names: tuple[BoundaryName, ...]) -> None:
        if names:
            self._out.do(p.DropBoundaries(names=names))

    def _go_on(self) -> bool:
        """Note that the loop goes on. Members in evaluations that it has passed by would wait for it in vain."""
        step = self._loop.step
        if step == self._begun:
            return False
        self._first = step if self._first is None else self._first
        self._begun, self._own = step, None
        for name in [name for name in self._others if name.after < step]:
            for source in sorted(self._others.pop(name)):
                self._answer(source, name)
        return True

    # --------------------------------------------------------------------------------------------------- the messages

    @handles(InEvaluation)
    def on_in_evaluation(self, source: str, message: InEvaluation) -> None:
        """Answer if the evaluation is over here. As the collector, take the member in."""
        # Only a member that has not voted since can be in an evaluation, and that holds up the next commit.
        name = message.name
        if name.after != self._commit.step:
            return
        if not self._answer(source, name):
            self._others.setdefault(name, set()).add(source)
        if self._collector == self._views.me:
            self._take_in(source, message)

    @handles(EvaluateBatches)
    def on_batches(self, message: EvaluateBatches) -> None:
        """Compute these batches."""
        if self._own is not None and self._own.name == message.name:
            self._drop(self._own.take_up(self._views.me, message))

    @handles(BatchBoundary)
    def on_batch_boundary(self, message: BatchBoundary, payload: object) -> None:
        """Take what crosses a cut above blocks of this member."""
        if self._own is not None and self._own.name == message.name:
            self._drop(self._own.receive(message.at))
            kept = Boundary(name=message.at, tensors=message.tensors, contribution=None)
            self._out.do(p.TakeBoundary(message=kept, payload=payload))

    @handles(BatchFigures)
    def on_figures(self, source: str, message: BatchFigures) -> None:
        """Take the figures of a batch as the collector."""
        if (shares := self._shares.get(message.name)) is not None:
            shares.take(source, message.batch, message.figures, message.problem)

    @handles(EvaluationResult)
    def on_result(self, message: EvaluationResult) -> None:
        """Take the result. The first one counts."""
        if message.name.after == self._commit.step:
            self._results.setdefault(message.name, message)
            self._shares.pop(message.name, None)

    @handles(OutsideEvaluation)
    def on_outside(self, source: str, message: OutsideEvaluation) -> None:
        """Do not wait for a member whose loop began behind the evaluation."""
        if (shares := self._shares.get(message.name)) is not None:
            shares.stay_out(source)

    def _answer(self, source: str, name: EvaluationName) -> bool:
        """Tell a member the result, or that this member takes no part. Returns True if it did."""
        if name in self._results:
            self._out.send(source, self._results[name])
        elif self._is_outside(name):
            self._out.send(source, OutsideEvaluation(name=name))
        elif self._begun > name.after:
            problem = (
                f"{name.call} was called on {source} after step {name.after}, and {self._views.me} has gone on "
                f"to step {self._begun} without it: call it on all members alike"
            )
            self._out.send(source, EvaluationResult(name=name, figures="", problem=problem))
        else:
            return False
        return True

    def _is_outside(self, name: EvaluationName) -> bool:
        return self._first is not None and name.step < self._first

    @property
    def _collector(self) -> str:
        return self._views.voters()[0]

    def _take_in(self, source: str, message: InEvaluation) -> None:
        if message.name in self._results:
            return
        shares = self._shares.setdefault(message.name, Shares(message.plan, message.batches))
        shares.join(source, message.plan)
        for batch, figures, problem in message.done:
            shares.take(source, batch, figures, problem)
        if self._is_outside(message.name):
            shares.stay_out(self._views.me)

    # ------------------------------------------------------------------------------------------- changes of step, view

    def begin(self, step: int) -> None:
        """Forget the evaluations before the last commit: every member has voted behind them."""
        for known in (self._results, self._shares, self._others):
            for name in [name for name in known if name.after < step - 1]:
                known.pop(name)

    def forget_view(self) -> None:
        """Forget which members are in evaluations, and which batches they have."""
        self._others.clear()
        self._chains.clear()
        if self._first is None:  # a result that the others do not know, after losses, is none
            self._results.clear()
        for shares in self._shares.values():
            shares.begin_view()
        if self._own is not None:
            self._own.begin_view()

    def resume(self, recovery: Recovery) -> None:
        """Forget figures that may come from wrong parameters, and what crossed cuts in the last view."""
        if self._own is not None:
            self._drop(self._own.resume())
        if recovery.wrong is not None:
            self._shares.clear()
            if self._own is not None:
                self._own.void()

    def why_not_yet(self) -> str:
        """Wait for the end of the evaluation."""
        return "" if self._own is None else f"{self._own.name.call} is under way here"

    # ------------------------------------------------------------------------------------------------------- progress

    def progress(self) -> bool:
        """Announce the loop's evaluation, hand out batches, tell the result, or answer the loop. True if it did."""
        return not self._views.is_recovering and (
            self._go_on() or self._announce() or self._hand_out() or self._conclude() or self._feed()
        )

    def _announce(self) -> bool:
        own = self._own
        if own is None or own.is_announced or own.name in self._results:
            return False
        # All that it has computed, because the collector that had the figures may be lost.
        begun, done = own.announce(), tuple((batch, *told) for batch, told in own.done.items())
        said = InEvaluation(name=own.name, plan=begun.plan, batches=begun.batches, done=done)
        self._out.send_all(self._views.others, said)
        if self._collector == self._views.me:
            self._take_in(self._views.me, said)
        return True

    def _hand_out(self) -> bool:
        given = [
            (name, each)
            for name, shares in self._shares.items()
            for each in shares.hand_out(self._takers(name, shares))
        ]
        for name, hand in given:
            chain = self._chains.get(name, {}).get(hand.member, ())
            said = EvaluateBatches(name=name, batches=hand.batches, chain=chain, over=hand.over)
            for member in dict.fromkeys([stage.member for stage in chain] or [hand.member]):
                if member == self._views.me:
                    self.on_batches(said)
                else:
                    self._out.send(member, said)
        return bool(given)

    def _takers(self, name: EvaluationName, shares: Shares) -> dict[str, int] | None:
        """Return who gets batches, and how many at a time; None: all members, if each has the whole model."""
        voters = self._views.voters()
        if name.from_rank is not None:
            return dict.fromkeys(shares.giver(name.from_rank, self._views.view.ids, voters), AHEAD)
        if self._replicas.are_all:
            return None
        if not shares.come >= set(voters):
            return {}
        # Chosen once in a view: what members hold does not change between two changes of view.
        if name not in self._chains:
            members = [m for m in voters if shares.is_in(m)]
            if not self._replicas.chains(members):  # some blocks are with newcomers, whose loops begin behind it
                places = self._replicas.adopt_lacking(members)
                self._out.send_all(self._views.others, BlocksAdopted(name=name, places=places))
            self._chains[name] = self._replicas.chains(members)
        # Enough for each member of the chain to have one, and one on its way.
        return {head: len(chain) + 1 for head, chain in self._chains[name].items()}

    def _conclude(self) -> bool:
        for name, shares in self._shares.items():
            # Newcomers of this view are not waited for: their loops begin behind the evaluation.
            if (found := shares.result(self._views.voters())) is not None:
                said = EvaluationResult(name=name, figures=found[0], problem=found[1])
                self._out.send_all(self._views.others, said)
                self.on_result(said)
                return True
        return False

    def _feed(self) -> bool:
        own = self._own
        if own is None or own.computing is not None:
            return False
        if (result := self._results.get(own.name)) is not None:
            self._own = None
            self._drop((*own.drop(), *own.resume()))
            self._out.do(p.EvaluationEnded(figures=result.figures, problem=result.problem))
            return True
        # Parameters that were found wrong are on their way again.
        if not self._commit.parameters.are_here() or (piece := own.next_piece()) is None:
            return False
        self._out.do(p.EvaluateBatch(name=own.name, batch=piece.batch, stage=piece.stage))
        return True
