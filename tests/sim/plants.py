"""Planted bugs: each breaks one rule of the protocol, and nothing else. The simulator has to find every one of them.

A plant is a subclass of the core, a subclass of the cluster (for the agent's rules) or a patched pure function. The
docstring is the rule that it breaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from elastrain import protocol as p
from elastrain.attempt import PartialSet, Weight
from elastrain.fold import Combine, Fold, Node, absorb, covers
from elastrain.ledger import Ledger, Tensor, UsedSlot
from elastrain.lifecycle import Lifecycle
from elastrain.messages import Gradient, LoopHandover, Publish
from elastrain.placement import Holders
from elastrain.recovery import decide
from elastrain.scaling import advance
from elastrain.values import Contribution, Record, Recovery, Report, Shape, Unrecoverable, Vote
from elastrain.voting import Disagreement, combine_votes
from elastrain.witness import Ends, Verdict
from elastrain.world import View
from tests.sim.cluster import Cluster, Scenario


@dataclass(frozen=True, kw_only=True)
class Plant:
    rule: str
    within: int
    """Found in at most this many schedules."""
    only: Callable[[Scenario], bool]
    """Which of the drawn scenarios count."""
    core: type[Lifecycle] = Lifecycle
    cluster: type[Cluster] = Cluster
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext


PLANTS: dict[str, Plant] = {}


Filter = Callable[[Scenario], bool]


def _any(scenario: Scenario) -> bool:
    return True


def _core(within: int, only: Filter = _any) -> Callable[[type[Lifecycle]], type[Lifecycle]]:
    def register(core: type[Lifecycle]) -> type[Lifecycle]:
        PLANTS[core.__name__] = Plant(rule=core.__doc__ or "", within=within, only=only, core=core)
        return core

    return register


def _cluster(within: int) -> Callable[[type[Cluster]], type[Cluster]]:
    def register(cluster: type[Cluster]) -> type[Cluster]:
        PLANTS[cluster.__name__] = Plant(rule=cluster.__doc__ or "", within=within, only=_any, cluster=cluster)
        return cluster

    return register


def _function(within: int, target: str, only: Filter = _any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a replacement for the pure function `target` (module.name)."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = "".join(part.capitalize() for part in function.__name__.split("_"))
        PLANTS[name] = Plant(
            rule=function.__doc__ or "",
            within=within,
            only=only,
            patch=lambda: patch(f"elastrain.{target}", function),
        )
        return function

    return register


# ------------------------------------------------------------------------------------------------- backups and commit


@_core(60)
class LetsGoBeforeVerified(Lifecycle):
    """A backup keeps gradient and record of s-1 until its update is verified."""

    def _on_applied_behind(self, event: p.AppliedBehind) -> None:
        held = self.held.get(event.shard)
        if held is not None:
            held.kept.pop(event.step, None)
        super()._on_applied_behind(event)


_FLIPS: Filter = lambda scenario: scenario.flips > 0  # noqa: E731  a filter among filters


@_core(100, only=_FLIPS)
class SkipsTheDigest(Lifecycle):
    """A backup swaps only after its digest matched the primary's."""

    def _verify(self, shard: int, step: int) -> None:
        held = self.held[shard]
        if step in held.scratch and step in held.expected:
            held.expected[step] = held.scratch[step]
        super()._verify(shard, step)


@_core(100, only=_FLIPS)
class EndsTheHealthySide(Lifecycle):
    """Whoever ends alone because of a difference is the one that is wrong."""

    def _end(self, verdict: Verdict) -> None:
        super()._end(replace(verdict, ends=Ends.MEMBER))


@_core(100, only=_FLIPS)
class ForgetsTheDoubt(Lifecycle):
    """A difference is followed until it is known which side is wrong."""

    def _ask(self, shard: int) -> None:
        held = self.held[shard]
        assert held.difference is not None
        held.scratch[held.difference.step] = held.difference.told
        held.difference = None
        self._verify(shard, self.committed)


@_core(100, only=_FLIPS)
class VotesBeforeParametersAreCompared(Lifecycle):
    """What a member has computed with is compared with what was published before it votes."""

    def _compare(self, found: dict[int, int]) -> None:
        super()._compare({shard: digest for shard, (_, digest) in self._told.items()})


@_core(60)
class VotesBeforeItsCheck(Lifecycle):
    """A member votes when the micro-batch that it checks is computed: the parameters are read until then."""

    def _is_checked(self) -> bool:
        return True


@_core(60, only=lambda scenario: scenario.members > 1)
class CountsWhatItChecks(Lifecycle):
    """What a member computes to check another counts for nothing."""

    def _on_checked(self, event: p.Checked) -> None:
        if event.run not in self.attempt.ended and event.run != self.attempt.running and event.check is not None:
            told = Contribution(event.check.loss, event.check.weight)
            self._on_run_done(p.BlockDone(step=event.step, run=event.run, block=0, contribution=told, touched=0))
        super()._on_checked(event)


@_core(60, only=lambda scenario: scenario.members > 1 and scenario.runs > 1)
class ChecksAnotherMicroBatch(Lifecycle):
    """Compared is what two members say of the same micro-batch."""

    def _recompute(self, run: int) -> None:
        super()._recompute(run)
        self._out[-1] = replace(self._out[-1], run=(run + 1) % self.shape.runs)

    def _on_checked(self, event: p.Checked) -> None:
        wanted = {*self.attempt.awaited} - {event.run}
        if event.run not in self.attempt.awaited and wanted and event.check is not None:
            (run,) = wanted
            event = replace(event, run=run, check=replace(event.check, micro_batch=run))
        super()._on_checked(event)


@_core(60)
class VotesWithoutBackups(Lifecycle):
    """A primary votes when it has its backups' acknowledgements."""

    def _is_safe(self, shard: int) -> bool:
        return shard in self.attempt.finished and self.held[shard].version == self.committed


@_core(200)
class VotesWhileACopyIsRead(Lifecycle):
    """Nothing is overwritten before its readers are done: no vote while a copy of the state is on its way."""

    def _may_vote(self) -> bool:
        copying, self._copying = self._copying, {}
        may = super()._may_vote()
        self._copying = copying
        return may


@_core(60)
class CommitsWithoutAVote(Lifecycle):
    """The votes of all members of the view make the record."""

    def _commit(self) -> None:
        if self.view is not None and len(self.attempt.votes) == len(self.view.ids) - 1 > 0:
            some = next(iter(self.attempt.votes.values()))
            for member in self.view.ids:
                self.attempt.votes.setdefault(member, replace(some, square_norms=(), roles=()))
        super()._commit()


@_core(60)
class ReleasesAtVote(Lifecycle):
    """A member keeps its own partials until the step is committed."""

    def _vote(self) -> None:
        voted = self.attempt.voted
        super()._vote()
        if self.attempt.voted and not voted:
            self._do(p.EndAttempt(step=self.attempt.step))


@_core(200)
class CopiesNever(Lifecycle):
    """What lost its backup is copied towards a new holder."""

    def _plan_copies(self) -> None:
        self._copies = []


@_core(400, only=lambda scenario: scenario.budget_bytes < 1 << 20 and scenario.steps > 4 and not scenario.slow)
class NeverRenewsTheBudget(Lifecycle):
    """So many bytes are copied per step, not per job."""

    def _learn(self, record: Record) -> None:
        copied_bytes = self._copied_bytes
        super()._learn(record)
        self._copied_bytes = copied_bytes


@_core(60)
class BackupsForgetWhatWasTouched(Lifecycle):
    """A backup moves the same parameters as the primary: those that got a gradient."""

    def _on_gradient(self, source: str, message: Gradient, payload: object) -> None:
        forgotten = tuple((0,) * len(masks) for masks in message.touched)
        super()._on_gradient(source, replace(message, touched=forgotten), payload)


@_function(60, "committing.combine_votes", lambda scenario: scenario.drifts > 0)
def compares_no_settings(step: int, view: View, votes: Sequence[Vote], **scaling: Any) -> Record | Disagreement:
    """Members with different hyperparameters commit nothing together."""
    return combine_votes(step, view, [replace(vote, settings="") for vote in votes], **scaling)


# ------------------------------------------------------------------------------------------------ joining and leaving


@_core(60, only=lambda scenario: scenario.joins > 0)
class EntersWithoutLoopState(Lifecycle):
    """A newcomer's training loop goes on where those of the others are."""

    def _do(self, command: p.Command) -> None:
        super()._do(replace(command, state=None) if isinstance(command, p.Enter) else command)


@_core(200, only=lambda scenario: scenario.joins > 0)
class SendsTheLoopStateOfTheStepBefore(Lifecycle):
    """What a newcomer gets is the loop state of the step that it enters."""

    def _pay_loop_state(self) -> None:
        if self._newcomers and not self.recovering and self._loop_state is not None:
            for member in self._newcomers:
                self._send(member, LoopHandover(step=self.committed + 1, state=self._loop_state[1]))
            self._newcomers = ()


@_core(60, only=lambda scenario: scenario.members > 1)
class LeavesAlone(Lifecycle):
    """The end of the job is a barrier."""

    def _leave(self) -> None:
        if self._finishing is not None and not self._over:
            self._over = True
            self._do(p.Leave())


# --------------------------------------------------------------------------------------------- publish and learning


@_core(60)
class LearnsWithoutPassing(Lifecycle):
    """Every publish carries the record: who receives it has passed, with all that this means for its own shards."""

    def _on_publish(self, message: Publish, payload: object) -> None:
        if message.record is not None and message.step == self.committed + 1:
            self._learn(message.record)
        super()._on_publish(message, payload)


@_core(60)
class ForgetsWhatItLearned(Lifecycle):
    """Learning is passing, and is never forgotten."""

    def _report(self) -> Report:
        report = super()._report()
        return replace(report, committed=report.committed - 1) if report.committed > 0 else report


@_core(60)
class PublishesOnlyToTheLate(Lifecycle):
    """After a change of view parameters are published again also when nobody passed anything new."""

    def _complete(self, decision: Recovery) -> None:
        late = any(report.committed not in (-1, decision.committed) for report in self._reports.values())
        super()._complete(decision if late or decision.committed < 0 else replace(decision, lacking={}))


# ------------------------------------------------------------------------------------------------------- recovery


def _blank(shape: Shape) -> Report:
    return Report(
        committed=-1,
        record=None,
        base=None,
        parameters=(-2,) * len(shape.shards),
        held=(),
        begun=-1,
        finishing=False,
        pending=(),
        fixed=0,
        own=((),) * shape.blocks,
        folded=(),
    )


@_core(60)
class DecidesWithoutAReport(Lifecycle):
    """Reports of all members of the view: a missing one means the next view, never a guess."""

    def _may_decide(self) -> bool:
        if self.recovering and self.view is not None and len(self._reports) == len(self.view.ids) - 1:
            for member in self.view.ids:
                self._reports.setdefault(member, _blank(self.shape))
        return super()._may_decide()


@_core(60)
class CompletesOnlyItsOwn(Lifecycle):
    """Recovery completes the highest committed step of all, not each member's own."""

    def _complete(self, decision: Recovery) -> None:
        own = replace(decision, committed=self.committed, record=self.record)
        super()._complete(decision if self.base is None else own)


@_function(60, "lifecycle.decide")
def takes_the_lowest_commit(view: View, reports: dict[str, Report], shape: Shape) -> Recovery | Unrecoverable:
    """The highest committed step is completed: a step can not be undone."""
    lowest = min((r.committed for r in reports.values() if r.base), default=-1)
    lowered = {
        m: replace(r, committed=lowest, parameters=tuple(min(v, lowest) for v in r.parameters)) if r.base else r
        for m, r in reports.items()
    }
    return decide(view, lowered, shape)


@_core(60)
class AppliesTwice(Lifecycle):
    """A step is applied once."""

    def _do(self, command: p.Command) -> None:
        super()._do(command)
        if isinstance(command, p.Apply):
            super()._do(command)


@_core(60)
class KeepsOldVotes(Lifecycle):
    """Votes and acknowledgements belong to one view."""

    def _switch(self) -> None:
        votes = dict(self.attempt.votes)
        super()._switch()
        self.attempt.votes.update(votes)


@_function(60, "lifecycle.decide")
def hands_out_twice(view: View, reports: dict[str, Report], shape: Shape) -> Recovery | Unrecoverable:
    """A missing run is handed out to exactly one member."""
    decision = decide(view, reports, shape)
    if isinstance(decision, Unrecoverable) or not decision.redone or len(view.ids) < 2:
        return decision
    giver = next((m for m in view.ids if len(decision.runs[m]) > reports[m].fixed), None)
    if giver is None:
        return decision
    taker = next(m for m in view.ids if m != giver)
    extra = decision.runs[giver][-1]
    return replace(decision, runs={**decision.runs, taker: (*decision.runs[taker], extra)})


@_core(60, only=lambda scenario: scenario.members > 1 and scenario.crashes + scenario.hunts > 0)
class HandsOutWhatIsUnderWay(Lifecycle):
    """A run under way stays with who computes it."""

    def _report(self) -> Report:
        report = super()._report()
        free = tuple(run for run in report.pending if run != self.attempt.running)
        return replace(report, pending=free, fixed=min(report.fixed, len(free)))


@_function(60, "lifecycle.decide")
def forgets_a_missing_run(view: View, reports: dict[str, Report], shape: Shape) -> Recovery | Unrecoverable:
    """Every run that nobody has is handed out again."""
    decision = decide(view, reports, shape)
    if isinstance(decision, Unrecoverable) or decision.redone < 2:
        return decision
    member = next((m for m in view.ids if len(decision.runs[m]) > len(reports[m].pending)), None)
    if member is None:
        return decision
    return replace(decision, runs={**decision.runs, member: decision.runs[member][:-1]})


# ---------------------------------------------------------------------------------------------------- generations


@_core(60)
class AcceptsOldGenerations(Lifecycle):
    """Frames of older generations are discarded."""

    def _is_stale(self, arrival: p.Arrived) -> bool:
        return False


@_core(60)
class DropsNewGenerations(Lifecycle):
    """Frames of newer generations are held and make the receiver read the view."""

    def _on_arrival(self, arrival: p.Arrived) -> None:
        super()._on_arrival(arrival)
        if self.view is None or arrival.generation > self.view.generation:
            self._later = [kept for kept in self._later if kept is not arrival]


@_core(200)
class DoesNotReadTheView(Lifecycle):
    """A frame of a newer generation makes the receiver go on to the view that it knows."""

    def _is_left_behind(self) -> bool:
        return False


@_core(200)
class JoinsByItsOwnView(Lifecycle):
    """A join takes effect at the step whose record names the new view, for everyone alike."""

    def _must_switch_now(self, view: View) -> bool:
        return True


# --------------------------------------------------------------------------------------------------------- holders


@_core(60)
class ChangesRolesWithoutCommit(Lifecycle):
    """Who is a holder is state, changed only by a commit."""

    def _on_copied(self, source: str, message: Any) -> None:
        super()._on_copied(source, message)
        if message.intact:
            now = list(self.now)
            holders = now[message.shard]
            if source not in holders.all:
                now[message.shard] = replace(holders, backups=(*holders.backups, source))
                self.now = tuple(now)


@_core(60)
class CountsAFollowerEarly(Lifecycle):
    """Who was only sent a copy is no holder yet."""

    def _proposed_roles(self, mine: Iterable[int]) -> Iterable[Any]:
        for shard in mine:
            assert self.base is not None
            if self.goal[shard] != self.base[shard]:
                yield shard, self.goal[shard]


@_function(100, "committing.next_roles", lambda scenario: scenario.budget_bytes < 1 << 20 and scenario.joins > 0)
def gives_up_holders(now: Holders, goal: Holders, ready: Collection[str]) -> Holders:
    """A commit never leaves fewer holders than verified copies allow."""
    left = tuple(member for member in goal.all if member in ready)
    return Holders(left[0], left[1:]) if left else now


@_function(60, "placement._forbidden")
def backs_up_on_the_same_node(primary: str, taken: tuple[str, ...], nodes: dict[str, str]) -> frozenset[str]:
    """Backups are never on the primary's node while another node lives."""
    return frozenset({primary, *taken})


@_core(60)
class DropsWhatItGaveAwayAtOnce(Lifecycle):
    """A holder keeps its copy until the commit that ends its role."""

    def _on_copied(self, source: str, message: Any) -> None:
        super()._on_copied(source, message)
        if source in self.goal[message.shard].all and self.me not in self.goal[message.shard].all:
            self._drop(message.shard)


@_core(
    600, lambda scenario: scenario.joins * scenario.backups > 0 and scenario.budget_bytes == 20 and scenario.steps < 5
)
class ForgetsAFollowerThatMustWait(Lifecycle):
    """A verified copy stays when roles change without it: its own time comes when the whole goal is verified."""

    def _change_roles(self, record: Record, before: tuple[Holders, ...]) -> None:
        super()._change_roles(record, before)
        self._dropping.update(s for s, holders in record.roles if s in self.held and self.me not in holders.all)


# ------------------------------------------------------------------------------------------------------------ agent


@_cluster(200)
class ProposesWithoutState(Cluster):
    """A proposal is valid only if every shard has a holder among those who remain."""

    def _holders(self) -> dict[str, tuple[str, ...]]:
        return {}


@_cluster(100)
class TakesSilenceForProof(Cluster):
    """Those who remain are a strict majority, or all who go are proven dead: silence is not proof."""

    def _consider(self) -> None:
        dead, self.dead = self.dead, {*self.dead, *self.asleep, *self.cut_off}
        super()._consider()
        self.dead = dead

    def _check_view(self, old: View, new: View) -> None:
        believed, self.dead = self.dead, self.dead - {*self.asleep, *self.cut_off}
        super()._check_view(old, new)
        self.dead = believed


# ----------------------------------------------------------------------------------------------------- fold and sums


@_core(60)
class ResendsWithoutContribution(Lifecycle):
    """What a partial stands for travels with it, also when it is sent again."""

    def _fold_in(
        self, block: int, node: Node, weight: Weight, lanes: Iterable[tuple[int, int]], payload: object
    ) -> None:
        generation = self.view.generation if self.view else 0
        super()._fold_in(block, node, weight if generation == 1 else (Contribution(), weight[1]), lanes, payload)


@_function(60, "committing.combine_votes")
def counts_at_the_voter(step: int, view: View, votes: Sequence[Vote], **scaling: Any) -> Record | Disagreement:
    """Loss and counts are folded with the partials, not taken from who votes."""
    record = combine_votes(step, view, votes, **scaling)
    if isinstance(record, Disagreement):
        return record
    share = record.contribution.samples // len(votes) * len(votes)
    return replace(record, contribution=replace(record.contribution, samples=share))


@_function(60, "committing.combine_votes")
def scales_by_the_first_vote(step: int, view: View, votes: Sequence[Vote], **scaling: Any) -> Record | Disagreement:
    """An overflow anywhere lowers the loss scale for all."""
    record = combine_votes(step, view, votes, **scaling)
    if isinstance(record, Disagreement):
        return record
    first = all(math.isfinite(norm) for _, norm in votes[0].square_norms)
    return replace(record, next_scaler=advance(scaling["rule"], scaling["scaler"], overflow=not first))


@_core(60, only=lambda scenario: scenario.joins > 0)
class NewcomersScaleAnew(Lifecycle):
    """Loss scaling is committed: a newcomer goes on with what the record says."""

    def _arrive(self, decision: Recovery) -> None:
        super()._arrive(decision)
        if self.record is not None:
            self.record = replace(self.record, next_scaler=self.shape.loss_scale.start)


@_function(60, "attempt.join_weights")
def mean_of_means(left: Weight, right: Weight) -> Weight:
    """The loss is a sum over the global batch, never a mean of means."""
    joined = left[0] + right[0]
    return replace(joined, loss=joined.loss / 2), left[1] | right[1]


@_function(60, "attempt.join_weights")
def touched_by_the_left_child(left: Weight, right: Weight) -> Weight:
    """A parameter has a gradient if any run gave it one."""
    return left[0] + right[0], left[1]


@_core(60)
class FoldsInArrivalOrder(Lifecycle):
    """Partials are added in the order of the tree, whichever came first."""

    def _do(self, command: p.Command) -> None:
        if isinstance(command, p.CombineShard) and self._out and isinstance(self._out[-1], p.Keep):
            c = command.combine
            if self._out[-1].node == c.right:
                super()._do(replace(command, combine=replace(c, left=c.right, right=c.left)))
                return
        super()._do(command)


def _adds_overlapping(self: PartialSet, node: Node, weight: Weight, within: Node | None = None) -> Any:
    inside = next((have for have in sorted(self.nodes) if have != node and covers(node, have)), None)
    if any(covers(have, node) for have in self.nodes):
        return None
    steps = _ADD(self, node, weight, within)
    if inside is None or steps is None:
        return steps
    return [Combine(left=node, right=inside, parent=node), *steps]


_ADD = PartialSet.add
PLANTS["AddsOverlapping"] = Plant(
    rule="Partials are nested or disjoint: overlapping ones are never added.",
    within=200,
    only=lambda scenario: scenario.pairs > 0,
    patch=lambda: patch.object(PartialSet, "add", _adds_overlapping),
)


@_function(60, "attempt.absorb")
def keeps_children(
    fold: Fold, held: frozenset[Node], node: Node, within: Node | None = None
) -> tuple[frozenset[Node], list[Combine]]:
    """Children are replaced by their parent."""
    nodes, steps = absorb(fold, held, node, within)
    return nodes | held, steps


# -------------------------------------------------------------------------------------------------------------- books


def _ledger(within: int, only: Filter = _any) -> Callable[[type[Ledger]], type[Ledger]]:
    def register(ledger: type[Ledger]) -> type[Ledger]:
        cluster = type(ledger.__name__, (Cluster,), {"ledger": ledger})
        PLANTS[ledger.__name__] = Plant(rule=ledger.__doc__ or "", within=within, only=only, cluster=cluster)
        return ledger

    return register


@_ledger(400, lambda scenario: scenario.members > 1 and scenario.crashes * scenario.stalls > 0)
class FreesASlotTwice(Ledger):
    """What is computed for a step after its end is discarded: its slot is free once."""

    def start_run(self) -> Any:
        slot = super().start_run()
        assert self._running is not None
        self._running.blocks = {0, 1, 2, 3}
        return slot

    def block_done(self, event: p.BlockDone) -> None:
        assert self._running is not None
        self._own.setdefault((event.step, event.block), {})[event.run, event.run + 1] = self._running

    def _recycle(self, slot: UsedSlot) -> None:
        if not slot.blocks and not slot.running:
            self._free_slots.append(slot.slot)


@_ledger(1500, lambda scenario: scenario.pairs > 0)
class TakesTheFirstSumForTheWhole(Ledger):
    """What is finished is the sum over all runs: a partial takes the place of those that it covers."""

    def _enter_fold(self, key: tuple[int, int], node: Node, tensor: Tensor) -> None:
        self._folds.setdefault(key, {})[node] = tensor

    def _finish(self, command: p.FinishGradients, shard: int) -> float:
        partials = self._folds[shard, 0]
        root = next(node for node in partials if node[0] == 0)
        partials[self._root] = partials.pop(root)
        return super()._finish(command, shard)


@_ledger(60)
class WritesWhatBelongsToOthers(Ledger):
    """A fold never writes into a member's own partial."""

    def _sum(self, shard: int, left: Tensor, right: Tensor) -> Tensor:
        out = getattr(left, "place", left)
        if hasattr(out, "slot"):
            out.slot.values[out.key] = self._arithmetic.new_buffer(left).value
        return super()._sum(shard, left, right)


@_ledger(400, lambda scenario: scenario.unread > 0 and scenario.members > 1)
class ReusesASlotThatIsWritten(Ledger):
    """A run that is computed again gets another slot: others may be reading what it has reported."""

    def change_slot(self) -> Any:
        assert self._running is not None
        return self._running.slot
