"""Planted bugs: each breaks one rule of the protocol, and nothing else. The simulator has to find every one of them.

A plant replaces one rule of a member's part or of its books (it is given the rule that it replaces), a pure function,
or a method of the cluster (for the agent's rules). The docstring is the rule that it breaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from elastrain import protocol as p
from elastrain.buffers.buffer_book import BufferBook
from elastrain.buffers.folds import Folds
from elastrain.buffers.port import Tensor
from elastrain.buffers.slots import GradientSlots, UsedSlot
from elastrain.decisions.recovery import decide
from elastrain.decisions.voting import Disagreement, combine_votes
from elastrain.integrity.arbitration import Side, Verdict
from elastrain.integrity.audits import Audits, Judgement, Told, judge
from elastrain.job.fold import Combine, Fold, Node, absorb, covers
from elastrain.job.placement import Holders
from elastrain.job.scaling import advance
from elastrain.job.values import (
    Accusation,
    AuditPlan,
    Contribution,
    Initial,
    OpenWork,
    Record,
    Recovery,
    Report,
    Shape,
    Unrecoverable,
    Vote,
)
from elastrain.job.world import View
from elastrain.member.checkpointing import Checkpointing
from elastrain.member.commit_rules import Committing
from elastrain.member.integrity.comparison import Comparison
from elastrain.member.integrity.cross_checks import Auditing, CrossCheck
from elastrain.member.integrity.mismatches import Mismatches
from elastrain.member.integrity.repair import Repair
from elastrain.member.job_end import JobEnd
from elastrain.member.loop_stages import LoopStages
from elastrain.member.member_machine import MemberMachine
from elastrain.member.recovering import Recovering
from elastrain.member.shards.backups import Backups
from elastrain.member.shards.copies import CopiesGiven
from elastrain.member.shards.initial_state import InitialState
from elastrain.member.shards.primaries import Primaries
from elastrain.member.shards.reduction import Reduction
from elastrain.member.state.ballot import Ballot, Commands
from elastrain.member.state.holdings import HeldShard
from elastrain.member.state.member_views import Views
from elastrain.member.state.runs import PartialSet, Weight
from elastrain.protocol.messages import Copied, Gradient, LoopHandover
from tests.sim.checks import Truth
from tests.sim.cluster import Cluster, Scenario
from tests.sim.member import Outbox, Run

Filter = Callable[[Scenario], bool]
Rule = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Plant:
    rule: str
    within: int
    """Found in at most this many schedules."""
    only: Filter
    """Which of the drawn scenarios count."""
    cluster: type[Cluster] = Cluster
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext


PLANTS: dict[str, Plant] = {}


def _any(scenario: Scenario) -> bool:
    return True


def _name(function: Rule) -> str:
    return "".join(part.capitalize() for part in function.__name__.split("_"))


@contextmanager
def _all(*patches: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


def _replaced(part: type, name: str, function: Rule) -> AbstractContextManager[Any]:
    """Patch a rule of a part: `function(rule, part, …)`, where `rule` is the one in the product."""
    rule = getattr(part, name)

    def planted(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(rule, self, *args, **kwargs)

    return patch.object(part, name, planted)


def _rule(within: int, part: type, name: str, only: Filter = _any, **more: Rule) -> Callable[[Rule], Rule]:
    """Register a replacement for a part's rule; `more` are further rules of the same part that it takes."""

    def register(function: Rule) -> Rule:
        replacements = {name: function, **more}
        PLANTS[_name(function)] = Plant(
            rule=function.__doc__ or "",
            within=within,
            only=only,
            patch=lambda: _all(*(_replaced(part, each, new) for each, new in replacements.items())),
        )
        return function

    return register


def _cluster(within: int) -> Callable[[type[Cluster]], type[Cluster]]:
    def register(cluster: type[Cluster]) -> type[Cluster]:
        PLANTS[cluster.__name__] = Plant(rule=cluster.__doc__ or "", within=within, only=_any, cluster=cluster)
        return cluster

    return register


def _function(within: int, target: str, only: Filter = _any) -> Callable[[Rule], Rule]:
    """Register a replacement for the pure function `target` (module.name)."""

    def register(function: Rule) -> Rule:
        PLANTS[_name(function)] = Plant(
            rule=function.__doc__ or "",
            within=within,
            only=only,
            patch=lambda: patch(f"elastrain.{target}", function),
        )
        return function

    return register


# --------------------------------------------------------------------------------------------------------------- audits


class Slipping(Cluster):
    """A job in which one member computes wrongly now and then, and every run is audited."""

    slips_at_once = 1

    def __init__(self, scenario: Scenario, seed: int, truth: Truth | None, *, is_strict: bool = True) -> None:
        self.accused: list[str] = []
        self.audited: list[tuple[str, int, int]] = []
        """(member, step, run) of each audit."""
        self.computed: list[tuple[str, int, int]] = []
        if not scenario.audit.every:
            scenario = replace(scenario, audit=AuditPlan(every=1, is_of_all=True, seed=seed))
        super().__init__(scenario, seed, truth)
        if scenario.slips and not is_strict:  # who was wrong may have died before others knew
            self.truth = self.checks.truth = None

    def _hit(self, kind: str) -> None:
        super()._hit(kind)
        if kind == "slip":
            for name in self.slipped:
                self.members[name].slips *= self.slips_at_once

    def _compute(self, name: str, run: Run | p.Recompute) -> None:
        if isinstance(run, Run):
            self.computed.append((name, run.compute.step, run.compute.run))
        elif run.whole:
            self.audited.append((name, run.step, run.run))
        super()._compute(name, run)

    def _take(self, name: str, out: Outbox) -> None:
        accusations = (f"came out wrong on {name}:", f"came out on {name} with another")
        self.accused += [name for sentence in out.noticed if any(each in sentence for each in accusations)]
        super()._take(name, out)


class Slipped(Slipping):
    """As it is planted: a faulty member, and no other fault."""

    def __init__(self, scenario: Scenario, seed: int, truth: Truth | None) -> None:
        quiet = replace(scenario, crashes=0, zombies=0, isolated=False, hunts=0, pairs=0, flips=0, drifts=0, slips=2)
        super().__init__(quiet, seed, truth)

    slips_at_once = 1000


def _audited(within: int, target: str) -> Callable[[Rule], Rule]:
    """As `_function`, in a job with audits."""

    def register(function: Rule) -> Rule:
        _function(within, target, lambda scenario: scenario.members > 2 and scenario.backups > 0)(function)
        PLANTS[_name(function)] = replace(PLANTS[_name(function)], cluster=Slipped)
        return function

    return register


@_audited(20, "integrity.audits.Audits.auditors_of")
def audits_its_own_runs(audits: Audits, owner: str, living: Collection[str]) -> tuple[str, ...]:
    """A run is audited by another member than the one that answers for it."""
    return (owner,)


@_audited(20, "decisions.voting.judge")
def commits_what_is_disputed(step: int, now: Told, before: Told) -> Judgement:
    """Where an audit differs from what it audits, nothing of the attempt is committed."""
    return Judgement()


@_audited(20, "decisions.voting.judge")
def accuses_those_who_agree(step: int, now: Told, before: Told) -> Judgement:
    """The member that is wrong is the one that others do not agree with."""
    judgement = judge(step, now, before)
    guilty = {member for member, _ in judgement.wrong}
    wrong = tuple((member, sentence) for _, sentence in judgement.wrong for member in now if member not in guilty)
    return replace(judgement, wrong=wrong)


@_audited(60, "member.integrity.cross_checks.Auditing.hear")
def only_those_who_saw_the_votes_know_who_was_wrong(auditing: Auditing, accused: Sequence[Accusation]) -> list[str]:
    """Whoever is wrong hears of it in the next view, since others may go on to that before it has got their votes."""
    return []


# ------------------------------------------------------------------------------------------------- backups and commit


@_rule(60, Backups, "on_applied_behind")
def lets_go_before_verified(rule: Rule, backups: Backups, event: p.AppliedBehind) -> None:
    """A backup keeps gradient and record of s-1 until its update is verified."""
    held = backups._holdings.find(event.shard)
    if held is not None:
        held.void(event.step)
    rule(backups, event)


_FLIPS: Filter = lambda scenario: scenario.flips > 0  # noqa: E731  a filter among filters


@_rule(100, Backups, "verify", _FLIPS)
def skips_the_digest(rule: Rule, backups: Backups, shard: int, step: int) -> None:
    """A backup swaps only after its digest matched the primary's."""
    held = backups._holdings[shard]
    digest = held.update_of(step)
    if digest is not None and held.expected_of(step) is not None:
        held._expected[step] = digest
    rule(backups, shard, step)


_OTHER_SIDE = {Side.MEMBER: Side.PRIMARY, Side.PRIMARY: Side.MEMBER}


@_rule(100, Mismatches, "_conclude", _FLIPS)
def chooses_the_wrong_side(rule: Rule, doubts: Mismatches, held: HeldShard, verdict: Verdict) -> bool:
    """Whoever lets go of its state because of a difference is the one that is wrong."""
    return bool(rule(doubts, held, replace(verdict, wrong=_OTHER_SIDE.get(verdict.wrong, verdict.wrong))))


@_rule(100, Mismatches, "ask", _FLIPS)
def forgets_the_doubt(rule: Rule, doubts: Mismatches, shard: int) -> bool:
    """A difference is followed until it is known which side is wrong."""
    held = doubts._holdings[shard]
    assert held.difference is not None
    held.update(held.difference.step, held.difference.told)
    held.settle()
    return True


_HEIRS: Filter = lambda scenario: scenario.heirs > 0  # noqa: E731  a filter among filters


@_rule(100, Primaries, "_look", _HEIRS)
def takes_over_unseen(rule: Rule, primaries: Primaries, shard: int) -> None:
    """Who becomes a primary looks whether the state that it takes over with is as it was verified."""


@_rule(100, Comparison, "is_looking", _HEIRS)
def votes_before_it_has_looked(rule: Rule, comparison: Comparison) -> bool:
    """A new primary votes when it knows that its state is as it was verified."""
    return False


@_rule(200, Primaries, "hold_back", _HEIRS)
def publishes_before_it_has_looked(
    rule: Rule, primaries: Primaries, wanted: dict[str, Sequence[int]]
) -> dict[str, Sequence[int]]:
    """A new primary publishes when it knows that its state is right: nobody's script sees wrong parameters."""
    rule(primaries, {})
    return wanted


@_rule(100, Comparison, "compare", _FLIPS)
def votes_before_parameters_are_compared(rule: Rule, comparison: Comparison, found: dict[int, int]) -> None:
    """What a member has computed with is compared with what was published before it votes."""
    rule(comparison, {shard: digest for shard, (_, digest) in comparison._told.items()})


@_rule(100, Folds, "_is_intact", _FLIPS)
def adds_what_came_changed(rule: Rule, folds: Folds, tensor: Tensor, checksum: int | None) -> bool:
    """What is added up is what its maker had: it is compared when it is used."""
    return True


@_rule(100, Repair, "known", _FLIPS)
def keeps_sums_of_wrong_parameters(rule: Rule, repair: Repair) -> None:
    """Of a step in which something was wrong nothing counts: whose sums it is in already is known to nobody."""
    rule(repair)


@_rule(100, Repair, "give_up", _FLIPS)
def keeps_a_state_that_has_changed(rule: Rule, repair: Repair, shard: int, reason: str) -> None:
    """Who knows that its state is wrong lets go of it: others answer for the shard."""
    repair.begin_anew(reason)


@_rule(60, CrossCheck, "is_done")
def votes_before_its_check(rule: Rule, check: CrossCheck) -> bool:
    """A member votes when the micro-batch that it checks is computed: the parameters are read until then."""
    return True


@_rule(60, MemberMachine, "_take_in", lambda scenario: scenario.members > 1)
def counts_what_it_checks(rule: Rule, core: MemberMachine, event: p.Event) -> None:
    """What a member computes to check another counts for nothing."""
    if isinstance(event, p.Checked) and event.check is not None:
        runs = core.machine.step.runs
        if event.run not in runs._ended and event.run not in runs.running:
            told = Contribution(event.check.loss, event.check.weight)
            done = p.BlockDone(step=event.step, run=event.run, block=0, contribution=told, touched=0)
            core.machine.step.reduction.on_block_done(done)
    rule(core, event)


def _another_run(rule: Rule, check: CrossCheck, run: int) -> p.Recompute:
    command: p.Recompute = rule(check, run)
    return replace(command, run=(run + 1) % check._runs.fold.runs)


@_rule(
    60, CrossCheck, "on_checked", lambda scenario: scenario.members > 1 and scenario.runs > 1, recompute=_another_run
)
def checks_another_micro_batch(rule: Rule, check: CrossCheck, event: p.Checked) -> None:
    """Compared is what two members say of the same micro-batch."""
    wanted = check._awaited - {event.run}
    if event.run not in check._awaited and wanted and event.check is not None:
        (run,) = wanted
        event = replace(event, run=run, check=replace(event.check, micro_batch=run))
    rule(check, event)


@_rule(60, Committing, "why_unsafe")
def votes_without_backups(rule: Rule, committing: Committing, shard: int) -> str:
    """A primary votes when it has its backups' acknowledgements."""
    m = committing._machine
    is_here = shard in m.step.reduction.finished and m.custody.holdings[shard].version == m.commit.step
    return "" if is_here else "the gradient is not finished"


@_rule(200, CopiesGiven, "is_reading")
def votes_while_a_copy_is_read(rule: Rule, given: CopiesGiven) -> bool:
    """Nothing is overwritten before its readers are done: no vote while a copy of the state is on its way."""
    return False


@_rule(60, Ballot, "votes")
def commits_without_a_vote(rule: Rule, ballot: Ballot, members: Collection[str]) -> list[Vote] | None:
    """The votes of all members of the view make the record."""
    if len(ballot._votes) == len(members) - 1 > 0:
        some = next(iter(ballot._votes.values()))
        for member in members:
            ballot._votes.setdefault(member, replace(some, square_norms=(), roles=()))
    votes: list[Vote] | None = rule(ballot, members)
    return votes


@_rule(60, Committing, "vote")
def releases_at_vote(rule: Rule, committing: Committing) -> bool:
    """A member keeps its own partials until the step is committed."""
    step = committing._machine.step
    voted = step.ballot.has_voted
    has_changed = bool(rule(committing))
    if step.ballot.has_voted and not voted:
        committing._machine.out.do(p.EndAttempt(step=step.number))
    return has_changed


@_rule(200, CopiesGiven, "plan")
def copies_never(rule: Rule, given: CopiesGiven) -> None:
    """What lost its backup is copied towards a new holder."""


@_rule(
    200,
    CopiesGiven,
    "is_overdue",
    lambda drawn: drawn.budget_bytes == 1 and drawn.slow > 0.3 and drawn.backups * drawn.crashes * drawn.joins > 0,
)
def votes_though_a_shard_is_short_of_holders(rule: Rule, given: CopiesGiven) -> bool:
    """The second step after a loss is committed only when every shard has its holders again."""
    return False


@_rule(400, CopiesGiven, "has_moved", lambda scenario: scenario.joins > 0 and scenario.steps > 4)
def never_moves_what_has_its_holders(rule: Rule, given: CopiesGiven) -> bool:
    """In each step something comes nearer to the target."""
    return True


@_rule(60, Backups, "on_gradient")
def backups_forget_what_was_touched(
    rule: Rule, backups: Backups, source: str, message: Gradient, payload: object
) -> None:
    """A backup moves the same parameters as the primary: those that got a gradient."""
    forgotten = tuple((0,) * len(masks) for masks in message.touched)
    rule(backups, source, replace(message, touched=forgotten), payload)


@_rule(4000, Backups, "on_gradient", lambda scenario: scenario.flips > 0)
def acknowledges_what_it_has_not_looked_at(
    rule: Rule, backups: Backups, source: str, message: Gradient, payload: object
) -> None:
    """A backup acknowledges a gradient once it has found it intact."""
    rule(backups, source, message, payload)
    if message.step == backups._runs.step:
        for shard in message.shards:
            backups._holdings.of(shard).owe(message.step, source)
        backups.acknowledge(message.shards)


@_function(60, "member.commit_rules.combine_votes", lambda scenario: scenario.drifts > 0)
def compares_no_settings(step: int, view: View, votes: Sequence[Vote], **rules: Any) -> Record | Disagreement:
    """Members with different hyperparameters commit nothing together."""
    return combine_votes(step, view, [replace(vote, settings="") for vote in votes], **rules)


# ------------------------------------------------------------------------------------------------ joining and leaving


@_rule(60, Commands, "do", lambda scenario: scenario.joins > 0)
def enters_without_loop_state(rule: Rule, out: Commands, command: p.Command) -> None:
    """A newcomer's training loop goes on where those of the others are."""
    rule(out, replace(command, state=None) if isinstance(command, p.Enter) else command)


@_rule(200, LoopStages, "hand_over", lambda scenario: scenario.joins > 0)
def sends_the_loop_state_of_the_step_before(rule: Rule, loop: LoopStages) -> bool:
    """What a newcomer gets is the loop state of the step that it enters."""
    if loop._newcomers and not loop._views.is_recovering and loop._state is not None:
        loop._out.send_all(loop._newcomers, LoopHandover(step=loop._commit.step + 1, state=loop._state[1]))
        loop._newcomers = ()
    return False


@_rule(60, JobEnd, "leave_together", lambda scenario: scenario.members > 1)
def leaves_alone(rule: Rule, end: JobEnd, *, whole: bool) -> None:
    """The end of the job is a barrier."""
    if end.step is not None and not end._out.is_closed:
        end._out.leave()


# --------------------------------------------------------------------------------------------- publish and learning


@_rule(60, MemberMachine, "_pass")
def learns_without_passing(rule: Rule, core: MemberMachine, record: Record) -> None:
    """Every publish carries the record: who receives it has passed, with all that this means for its own shards."""
    if core.machine.step.ballot.votes(core.machine.views.view.ids) is None:  # it learns it from another member
        core._committing.learn(record)
    else:
        rule(core, record)


@_rule(60, Recovering, "report")
def forgets_what_it_learned(rule: Rule, recovering: Recovering) -> Report:
    """Learning is passing, and is never forgotten."""
    report: Report = rule(recovering)
    return replace(report, committed=report.committed - 1) if report.committed > 0 else report


@_rule(60, Recovering, "complete")
def publishes_only_to_the_late(rule: Rule, recovering: Recovering, decision: Recovery) -> None:
    """After a change of view parameters are published again also when nobody passed anything new."""
    reports = recovering._machine.views.reports.values()
    late = any(report.committed not in (-1, decision.committed) for report in reports)
    rule(recovering, decision if late or decision.committed < 0 else replace(decision, lacking={}))


# ------------------------------------------------------------------------------------------------------- recovery


def _blank(shape: Shape) -> Report:
    return Report(
        wrong=None,
        committed=-1,
        record=None,
        base=None,
        parameters=(-2,) * len(shape.shards),
        held=(),
        begun=-1,
        finishing=False,
        work=OpenWork(),
        own=((),) * shape.blocks,
        folded=(),
    )


@_rule(60, MemberMachine, "_recover")
def decides_without_a_report(rule: Rule, core: MemberMachine) -> bool:
    """Reports of all members of the view: a missing one means the next view, never a guess."""
    views = core.machine.views
    if views.is_recovering and views.current is not None and len(views.reports) == len(views.current.ids) - 1:
        for member in views.current.ids:
            views.reports.setdefault(member, _blank(core.shape))
    return bool(rule(core))


@_rule(60, Recovering, "complete")
def completes_only_its_own(rule: Rule, recovering: Recovering, decision: Recovery) -> None:
    """Recovery completes the highest committed step of all, not each member's own."""
    commit = recovering._machine.commit
    own = replace(decision, committed=commit.step, record=commit.record)
    rule(recovering, decision if commit.roles.committed is None else own)


@_function(60, "member.recovering.decide")
def takes_the_lowest_commit(view: View, reports: dict[str, Report], shape: Shape) -> Recovery | Unrecoverable:
    """The highest committed step is completed: a step cannot be undone."""
    lowest = min((r.committed for r in reports.values() if r.base), default=-1)
    lowered = {
        m: replace(r, committed=lowest, parameters=tuple(min(v, lowest) for v in r.parameters)) if r.base else r
        for m, r in reports.items()
    }
    return decide(view, lowered, shape)


@_rule(60, Commands, "do")
def applies_twice(rule: Rule, out: Commands, command: p.Command) -> None:
    """A step is applied once."""
    rule(out, command)
    if isinstance(command, p.Apply):
        rule(out, command)


@_rule(60, Recovering, "switch")
def keeps_old_votes(rule: Rule, recovering: Recovering) -> None:
    """Votes and acknowledgements belong to one view."""
    ballot = recovering._machine.step.ballot
    votes = ballot._votes
    rule(recovering)
    ballot._votes.update(votes)


@_function(60, "member.recovering.decide")
def hands_out_twice(view: View, reports: dict[str, Report], shape: Shape) -> Recovery | Unrecoverable:
    """A missing run is handed out to exactly one member."""
    decision = decide(view, reports, shape)
    if isinstance(decision, Unrecoverable) or not decision.redone or len(view.ids) < 2:
        return decision
    giver = next((m for m in view.ids if len(decision.runs[m]) > reports[m].work.fixed), None)
    if giver is None:
        return decision
    taker = next(m for m in view.ids if m != giver)
    extra = decision.runs[giver][-1]
    return replace(decision, runs={**decision.runs, taker: (*decision.runs[taker], extra)})


@_rule(60, Recovering, "report", lambda scenario: scenario.members > 1 and scenario.crashes + scenario.hunts > 0)
def hands_out_what_is_under_way(rule: Rule, recovering: Recovering) -> Report:
    """A run under way stays with who computes it."""
    report: Report = rule(recovering)
    free = tuple(run for run in report.work.pending if run not in recovering._machine.step.runs.running)
    return replace(report, work=OpenWork(pending=free, fixed=min(report.work.fixed, len(free))))


@_function(60, "member.recovering.decide")
def forgets_a_missing_run(view: View, reports: dict[str, Report], shape: Shape) -> Recovery | Unrecoverable:
    """Every run that nobody has is handed out again."""
    decision = decide(view, reports, shape)
    if isinstance(decision, Unrecoverable) or decision.redone < 2:
        return decision
    member = next((m for m in view.ids if len(decision.runs[m]) > len(reports[m].work.pending)), None)
    if member is None:
        return decision
    return replace(decision, runs={**decision.runs, member: decision.runs[member][:-1]})


# ---------------------------------------------------------------------------------------------------- generations


@_rule(60, Views, "is_stale")
def accepts_old_generations(rule: Rule, views: Views, arrival: p.Arrived) -> bool:
    """Frames of older generations are discarded."""
    return False


@_rule(60, Views, "hold")
def drops_new_generations(rule: Rule, views: Views, arrival: p.Arrived) -> None:
    """Frames of newer generations are held and make the receiver read the view."""
    rule(views, arrival)
    views._waiting.remove(arrival)


@_rule(200, Views, "is_left_behind")
def does_not_read_the_view(rule: Rule, views: Views) -> bool:
    """A frame of a newer generation makes the receiver go on to the view that it knows."""
    return False


@_rule(200, Views, "must_switch_now")
def joins_by_its_own_view(rule: Rule, views: Views, view: View) -> bool:
    """A join takes effect at the step whose record names the new view, for everyone alike."""
    return True


# --------------------------------------------------------------------------------------------------------- holders


@_rule(60, CopiesGiven, "on_copied")
def changes_roles_without_commit(rule: Rule, given: CopiesGiven, source: str, message: Copied) -> None:
    """Who is a holder is state, changed only by a commit."""
    rule(given, source, message)
    roles = given._commit.roles
    if message.intact and source not in roles.live[message.shard].all:
        live = list(roles.live)
        holders = live[message.shard]
        live[message.shard] = replace(holders, backups=(*holders.backups, source))
        roles.set_live(tuple(live))


@_rule(60, Committing, "proposed_roles")
def counts_a_follower_early(rule: Rule, committing: Committing, mine: Iterable[int]) -> Iterable[Any]:
    """Who was only sent a copy is no holder yet."""
    roles = committing._machine.commit.roles
    for shard in mine:
        assert roles.committed is not None
        if roles.target[shard] != roles.committed[shard]:
            yield shard, roles.target[shard]


@_function(
    100, "member.commit_rules.next_roles", lambda scenario: scenario.budget_bytes < 1 << 20 and scenario.joins > 0
)
def gives_up_holders(now: Holders, goal: Holders, ready: Collection[str]) -> Holders:
    """A commit never leaves fewer holders than verified copies allow."""
    left = tuple(member for member in goal.all if member in ready)
    return Holders(left[0], left[1:]) if left else now


@_function(60, "job.placement._forbidden")
def backs_up_on_the_same_node(primary: str, taken: tuple[str, ...], nodes: dict[str, str]) -> frozenset[str]:
    """Backups are never on the primary's node while another node lives."""
    return frozenset({primary, *taken})


@_rule(60, CopiesGiven, "on_copied")
def drops_what_it_gave_away_at_once(rule: Rule, given: CopiesGiven, source: str, message: Copied) -> None:
    """A holder keeps its copy until the commit that ends its role."""
    rule(given, source, message)
    goal = given._commit.roles.target[message.shard].all
    if source in goal and given._commit.roles._me not in goal:
        given._holdings.drop(message.shard)


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


@_rule(60, Reduction, "fold_in")
def resends_without_contribution(
    rule: Rule, reduction: Reduction, maker: str, block: int, node: Node, weight: Weight, *rest: Any
) -> None:
    """What a partial stands for travels with it, also when it is sent again."""
    is_first = reduction._views.view.generation == 1
    rule(reduction, maker, block, node, weight if is_first else (Contribution(), weight[1]), *rest)


@_function(60, "member.commit_rules.combine_votes")
def counts_at_the_voter(step: int, view: View, votes: Sequence[Vote], **rules: Any) -> Record | Disagreement:
    """Loss and counts are folded with the partials, not taken from who votes."""
    record = combine_votes(step, view, votes, **rules)
    if isinstance(record, Disagreement):
        return record
    share = record.contribution.samples // len(votes) * len(votes)
    return replace(record, contribution=replace(record.contribution, samples=share))


@_function(60, "member.commit_rules.combine_votes")
def scales_by_the_first_vote(step: int, view: View, votes: Sequence[Vote], **rules: Any) -> Record | Disagreement:
    """An overflow anywhere lowers the loss scale for all."""
    record = combine_votes(step, view, votes, **rules)
    if isinstance(record, Disagreement):
        return record
    first = all(math.isfinite(norm) for _, norm in votes[0].square_norms)
    return replace(record, next_scaler=advance(rules["shape"].loss_scale, rules["now"].scaler, overflow=not first))


@_rule(60, Recovering, "arrive", lambda scenario: scenario.joins > 0)
def newcomers_scale_anew(rule: Rule, recovering: Recovering, decision: Recovery) -> None:
    """Loss scaling is committed: a newcomer goes on with what the record says."""
    rule(recovering, decision)
    commit = recovering._machine.commit
    if commit.record is not None:
        commit.record = replace(commit.record, next_scaler=recovering._machine.shape.loss_scale.start)


@_function(60, "member.state.runs.join_weights")
def mean_of_means(left: Weight, right: Weight) -> Weight:
    """The loss is a sum over the global batch, never a mean of means."""
    joined = left[0] + right[0]
    return replace(joined, loss=joined.loss / 2), left[1] | right[1]


@_function(60, "member.state.runs.join_weights")
def touched_by_the_left_child(left: Weight, right: Weight) -> Weight:
    """A parameter has a gradient if any run gave it one."""
    return left[0] + right[0], left[1]


@_rule(60, Commands, "do")
def folds_in_arrival_order(rule: Rule, out: Commands, command: p.Command) -> None:
    """Partials are added in the order of the tree, whichever came first."""
    last = out._commands[-1] if len(out) else None
    if isinstance(command, p.CombineShard) and isinstance(last, p.Keep) and last.node == command.combine.right:
        c = command.combine
        command = replace(command, combine=replace(c, left=c.right, right=c.left))
    rule(out, command)


@_rule(200, PartialSet, "add", lambda scenario: scenario.pairs > 0)
def adds_overlapping(
    rule: Rule, partials: PartialSet, node: Node, weight: Weight, within: Node | None = None
) -> list[Combine] | None:
    """Partials are nested or disjoint: overlapping ones are never added."""
    inside = next((have for have in sorted(partials.nodes) if have != node and covers(node, have)), None)
    if any(covers(have, node) for have in partials.nodes):
        return None
    steps: list[Combine] | None = rule(partials, node, weight, within)
    if inside is None or steps is None:
        return steps
    return [Combine(left=node, right=inside, parent=node), *steps]


@_function(60, "member.state.runs.absorb")
def keeps_children(
    fold: Fold, held: frozenset[Node], node: Node, within: Node | None = None
) -> tuple[frozenset[Node], list[Combine]]:
    """Children are replaced by their parent."""
    nodes, steps = absorb(fold, held, node, within)
    return nodes | held, steps


# ------------------------------------------------------------------------------------------------- the initial state


def _resumes(scenario: Scenario) -> bool:
    return scenario.resumes is not None


@_rule(20, InitialState, "may_be_made", _resumes)
def makes_what_is_not_read(rule: Rule, initial: InitialState) -> bool:
    """A job that starts from a checkpoint makes no state before it has read it."""
    if not initial._commit.parameters.are_here():
        initial._commit.parameters.have_initial()
    return True


@_rule(60, InitialState, "_missing", _resumes)
def forgets_what_a_view_adds(rule: Rule, initial: InitialState) -> list[int]:
    """What a change of view gives a member before the first commit, it reads, too."""
    missing: list[int] = [] if initial._commit.parameters.are_here() else rule(initial)
    return missing


@_function(60, "member.recovering.decide", lambda scenario: scenario.resumes is not None and scenario.resumes >= 0)
def takes_a_checkpoint_for_a_commit(view: View, reports: dict[str, Report], shape: Shape) -> Recovery | Unrecoverable:
    """Before its first commit a resumed job loses nothing with any member: all can read what they start from."""
    return decide(view, reports, replace(shape, initial=Initial()))


# -------------------------------------------------------------------------------------------------------------- books


def _starts_with_all_blocks(rule: Rule, slots: GradientSlots) -> Any:
    slot = rule(slots)
    assert slots._running is not None
    slots._running.blocks = {0, 1, 2, 3}
    return slot


def _recycles_without_looking(rule: Rule, slots: GradientSlots, slot: UsedSlot) -> None:
    if not slot.blocks and not slot.is_running:
        slots._free.append(slot.slot)


@_rule(
    400,
    GradientSlots,
    "block_done",
    lambda scenario: scenario.members > 1 and scenario.crashes * scenario.stalls > 0,
    start_run=_starts_with_all_blocks,
    _recycle=_recycles_without_looking,
)
def frees_a_slot_twice(rule: Rule, slots: GradientSlots, event: p.BlockDone) -> None:
    """What is computed for a step after its end is discarded: its slot is free once."""
    assert slots._running is not None
    slots._own.setdefault((event.step, event.block), {})[event.run, event.run + 1] = slots._running


def _finds_the_first(rule: Rule, folds: Folds, step: int, shard: int) -> float:
    partials = folds._folds[shard, 0]
    root = next(node for node in partials if node[0] == 0)
    partials[folds._root] = partials.pop(root)
    norm: float = rule(folds, step, shard)
    return norm


@_rule(1500, Folds, "_enter", lambda scenario: scenario.pairs > 0, _finish=_finds_the_first)
def takes_the_first_sum_for_the_whole(
    rule: Rule, folds: Folds, key: tuple[int, int], node: Node, tensor: Tensor
) -> None:
    """What is finished is the sum over all runs: a partial takes the place of those that it covers."""
    folds._folds.setdefault(key, {})[node] = tensor


@_rule(60, Folds, "_sum")
def writes_what_belongs_to_others(rule: Rule, folds: Folds, shard: int, left: Tensor, right: Tensor) -> Tensor:
    """A fold never writes into a member's own partial."""
    out = getattr(left, "place", left)
    if hasattr(out, "slot"):
        out.slot.values[out.key] = folds._arithmetic.new_buffer(left).value
    return rule(folds, shard, left, right)


@_rule(400, GradientSlots, "change", lambda scenario: scenario.unread > 0 and scenario.members > 1)
def reuses_a_slot_that_is_written(rule: Rule, slots: GradientSlots) -> Any:
    """A run that is computed again gets another slot: others may be reading what it has reported."""
    assert slots._running is not None
    return slots._running.slot


# ------------------------------------------------------------------------------------------------ durable checkpoints

_CHECKPOINTS: Filter = lambda scenario: scenario.checkpoint_every > 0  # noqa: E731  a filter among filters


@_rule(120, BufferBook, "_settle", _CHECKPOINTS)
def captures_after_the_next_update(rule: Rule, ledger: BufferBook, command: p.Command) -> None:
    """A checkpoint has the state of its step: what is not copied yet is copied before the next update."""
    if not isinstance(command, p.Apply):
        rule(ledger, command)


@_rule(40, Checkpointing, "_complete", _CHECKPOINTS)
def completes_without_all_parts(rule: Rule, checkpointing: Checkpointing) -> None:
    """A checkpoint becomes visible when all of its shards are written."""
    found = checkpointing.open
    if found is not None and found.collected:
        found.writers = frozenset(found.collected)
    rule(checkpointing)


@_rule(100, Checkpointing, "resume", _CHECKPOINTS)
def forgets_what_was_not_heard(rule: Rule, checkpointing: Checkpointing, recovery: Recovery) -> None:
    """What was told in the last view is told again in the next: the checkpoint is completed, or given up."""


@_rule(40, Checkpointing, "on_began", _CHECKPOINTS)
def keeps_the_loop_of_the_step_before(rule: Rule, checkpointing: Checkpointing, step: int, state: str) -> None:
    """A checkpoint has the loop's state with which the next step begins."""
    rule(checkpointing, step, str(step - 1))
