"""Combination of all members' votes into the commit record. Every member combines the same votes to the same record."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastrain.decisions.agreed_speeds import agreed_speeds
from elastrain.integrity.audits import Judgement, judge
from elastrain.integrity.checks import difference, what_differs
from elastrain.job.checkpoint_plan import Checkpointed, CheckpointVote, decide
from elastrain.job.placement import Holders
from elastrain.job.run_plan import Speeds
from elastrain.job.scaling import NO_SCALE, Scaler, advance
from elastrain.job.streams import combine_marks
from elastrain.job.values import Accusation, Contribution, Findings, Record, Shape, Vote
from elastrain.job.world import View
from elastrain.pipeline.moves import moved_on
from elastrain.pipeline.pipeline_plan import PipelinePlan


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """Votes that cannot belong to the same job."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Dispute:
    """Differing results of audits. The step is computed again before anything of it counts."""

    reason: str
    accused: tuple[Accusation, ...]
    """Members whose results are known to be wrong."""


@dataclass(frozen=True, kw_only=True)
class InForce:
    """Decisions of the last record that hold for the open step."""

    scaler: Scaler = NO_SCALE
    plan: PipelinePlan | None = None
    speeds: Speeds = field(default_factory=dict)
    """Speeds of members, by which runs are handed out without pipelines."""


_NOTHING = InForce()


def combine_votes(
    step: int,
    view: View,
    votes: Sequence[Vote],
    *,
    shape: Shape,
    now: InForce = _NOTHING,
) -> Record | Disagreement | Dispute:
    """Combine votes, in rank order and one per member, into the record of `step`.

    `now` is what the last record has decided about this step. Squared norms are added in shard order, whichever member
    measured them. An overflow of any micro-batch stays in the sums, so the norm or the loss shows it.
    """
    if (parted := _of_two_jobs(step, view, votes)) is not None:
        return parted
    told = {m: v.checks for m, v in zip(view.ids, votes, strict=False)}
    before = {m: v.before for m, v in zip(view.ids, votes, strict=False)}
    # Without audits the cause is the script, or a machine of another kind: computing again would not help.
    judgement = judge(step, told, before) if shape.audit.every else Judgement()
    if judgement.disputed and not judgement.is_hopeless:
        return Dispute(reason=what_differs(step, told, shape.block_names), accused=_accused(view, judgement))
    differing = difference(step, told, shape.block_names)
    if differing and shape.deterministic:
        return Disagreement(reason=differing)
    contribution = _contribution(step, votes, is_deterministic=shape.deterministic)
    if isinstance(contribution, Disagreement):
        return contribution
    square_norm = _square_norm(votes)
    is_finite = math.isfinite(square_norm) and math.isfinite(contribution.loss)
    planned = _planned(step, dict(zip(view.ids, votes, strict=False)), now.plan)
    return Record(
        step=step,
        generation=view.generation,
        contribution=contribution,
        square_norm=square_norm,
        skipped=not is_finite or contribution.weight == 0.0,  # a mean over no weight is no number
        # Only when all have seen a newer view: a member that had not could not compute the next step there.
        switch=min(vote.seen for vote in votes) > view.generation,
        roles=_roles(votes, has_moved=planned != now.plan and planned == (now.plan and now.plan.goal)),
        scaler=now.scaler,
        next_scaler=advance(shape.loss_scale, now.scaler, overflow=not is_finite),
        plan=planned,
        findings=_findings(view, votes, judgement, warning=differing, speeds=_speeds(view, votes, shape, now.speeds)),
        checkpoint=_checkpointed([vote.checkpoint for vote in votes]),
    )


def _checkpointed(told: Sequence[CheckpointVote]) -> Checkpointed:
    return decide([each.wish for each in told], writing=any(each.is_writing for each in told))


def _roles(votes: Sequence[Vote], *, has_moved: bool) -> tuple[tuple[int, Holders], ...]:
    """Return the changed holders by shard. `has_moved`: the plan that was coming holds, and shards go with blocks."""
    found = {shard: holders for vote in votes for shard, holders in vote.roles}
    # A shard that changes its holders anyway goes with its block: the present primary knows both.
    if has_moved:
        hands = [pair for vote in votes if vote.plan is not None for pair in vote.plan.hands]
        found |= {shard: Holders(members[0], members[1:]) for shard, members in hands}
    return tuple(sorted(found.items(), key=lambda pair: pair[0]))


def _planned(step: int, votes: Mapping[str, Vote], present: PipelinePlan | None) -> PipelinePlan | str | None:
    says = {member: vote.plan for member, vote in votes.items() if vote.plan is not None}
    told = next((each.proposed for each in says.values() if each.proposed is not None), None)
    if told is None and present is not None:
        are_taken = not any(each.lacks_taker for each in says.values())
        told = moved_on(present, {m: each.is_ready for m, each in says.items()}, step, are_taken=are_taken)
    # A plan that stays is known to all members, and travels with every publish.
    return told.digest if told is not None and told == present else told


def _speeds(view: View, votes: Sequence[Vote], shape: Shape, present: Speeds) -> tuple[tuple[str, int], ...]:
    # By the votes of all members, so that none hands out by what it alone has measured.
    told = list(zip(view.ids, (vote.plan for vote in votes), strict=False))
    # A share that grows takes memory, and whose share grows depends on the times of all.
    if any(plan is not None and plan.is_full for _, plan in told):
        return ()
    told_s = {m: plan.micro_batch_s for m, plan in told if plan is not None and plan.micro_batch_s is not None}
    return tuple(agreed_speeds(present, told_s, view.ids, shape.runs).items())


def _findings(
    view: View, votes: Sequence[Vote], judgement: Judgement, *, warning: str, speeds: tuple[tuple[str, int], ...]
) -> Findings:
    marks = combine_marks(tuple(vote.marks for vote in votes))
    return Findings(warning=warning, accused=_accused(view, judgement), marks=marks, speeds=speeds)


def _square_norm(votes: Sequence[Vote]) -> float:
    # In shard order, whichever member measured them: the clipping factor must have the same bits on every member.
    return sum(norm for _, norm in sorted(pair for vote in votes for pair in vote.square_norms))


def _of_two_jobs(step: int, view: View, votes: Sequence[Vote]) -> Disagreement | None:
    # Different settings would make members differ after the next update, so the step is not committed.
    if len({vote.settings for vote in votes}) > 1:
        return _different_settings(step, votes)
    if len({vote.graph for vote in votes}) == 1:
        return None
    graphs = {member: vote.graph for member, vote in zip(view.ids, votes, strict=True)}
    return Disagreement(reason=different_graphs(step, graphs))


def _accused(view: View, judgement: Judgement) -> tuple[Accusation, ...]:
    return tuple(Accusation(view.generation, member, reason) for member, reason in judgement.wrong)


def _contribution(step: int, votes: Sequence[Vote], *, is_deterministic: bool) -> Contribution | Disagreement:
    """Return the contribution of the step's gradient. Every primary has folded it for itself, and all must agree."""
    told = [vote.contribution for vote in votes if vote.contribution is not None]
    # Without determinism a run computed again has another loss. The shards then have to agree on the samples only, and
    # the first member's loss and figures count.
    compared = told if is_deterministic else [replace(each, loss=0.0, sums=()) for each in told]
    if len({repr(each) for each in compared}) != 1:  # repr: a NaN loss is the same NaN to all
        return Disagreement(reason=f"shards of step {step} were folded from different contributions: {told}")
    return told[0]


def _different_settings(step: int, votes: Sequence[Vote]) -> Disagreement:
    differing = _differing({vote.settings for vote in votes})
    return Disagreement(
        reason=f"members entered step {step} with different {differing}: every member has to "
        "run the same script with the same arguments; schedulers, layers and what is registered have to be changed "
        "alike on all, as functions of step.number"
    )


def different_graphs(step: int, told: Mapping[str, str], where: str = "see `traced` in their journals") -> str:
    """Return the error text for members whose block graphs differ. `told`: member -> digest of its graph."""
    names = ", ".join(f"{member}: {digest[:8] or 'none'}" for member, digest in told.items())
    return (
        f"members have traced different block graphs in step {step} ({names}): {where}; the same blocks have to be "
        "entered in the same order, with the same tensors, on every member"
    )


def _differing(settings: Iterable[str]) -> str:
    """Name the settings for which members sent different digests."""
    # Names, because a digest does not tell a user where to look.
    told = [json.loads(text) for text in settings]
    names = dict.fromkeys(name for one in told for name in one)
    return ", ".join(name for name in names if len({one.get(name) for one in told}) > 1)
