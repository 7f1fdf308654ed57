"""Votes of all members become the commit record: the same on every member, because all combine the same votes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from elastrain.checks import difference
from elastrain.scaling import NO_SCALE, UNSCALED, LossScale, Scaler, advance
from elastrain.values import Record, Vote
from elastrain.world import View


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """Votes that cannot be of one job."""

    reason: str


def combine_votes(
    step: int,
    view: View,
    votes: Sequence[Vote],
    *,
    rule: LossScale = UNSCALED,
    scaler: Scaler = NO_SCALE,
    deterministic: bool = True,
    blocks: Sequence[str] = (),
) -> Record | Disagreement:
    """`votes` in rank order, one per member. Squared norms are added in shard order, whoever measured them.

    An overflow of any micro-batch stays in the sums, so the norm or the loss tells it. `scaler`: that of this step.
    Not deterministic, a run computed again has another loss: then shards agree on which samples are in, and the first
    member's loss counts, and micro-batches that came out differently on two members are worth a warning. `blocks` are
    the names of the model's.
    """
    settings = {vote.settings for vote in votes}
    if len(settings) > 1:
        names = ", ".join(f"{m}: {v.settings}" for m, v in zip(view.ids, votes, strict=True))
        return Disagreement(
            reason=f"members entered step {step} with different {_differing(settings)} ({names}): every member has to "
            "run the same script with the same arguments; schedulers, layers and what is registered have to be changed "
            "alike on all, as functions of step.number"
        )
    differing = difference(step, {m: v.checks for m, v in zip(view.ids, votes, strict=False)}, blocks)
    if differing and deterministic:
        return Disagreement(reason=differing)
    contributions = [vote.contribution for vote in votes if vote.contribution is not None]
    compared = contributions if deterministic else [replace(told, loss=0.0) for told in contributions]
    if len({repr(contribution) for contribution in compared}) != 1:  # repr: a NaN loss is the same NaN to all
        return Disagreement(reason=f"shards of step {step} were folded from different contributions: {contributions}")
    contribution = contributions[0]
    square_norm = sum(norm for _, norm in sorted(pair for vote in votes for pair in vote.square_norms))
    finite = math.isfinite(square_norm) and math.isfinite(contribution.loss)
    return Record(
        step=step,
        generation=view.generation,
        contribution=contribution,
        square_norm=square_norm,
        skipped=not finite or contribution.weight == 0.0,
        switch=min(vote.seen for vote in votes) > view.generation,
        roles=tuple(sorted((pair for vote in votes for pair in vote.roles), key=lambda pair: pair[0])),
        scaler=scaler,
        next_scaler=advance(rule, scaler, overflow=not finite),
        warning=differing,
    )


def _differing(settings: Iterable[str]) -> str:
    """The names under which members told different digests."""
    told = [json.loads(text) for text in settings]
    names = dict.fromkeys(name for one in told for name in one)
    return ", ".join(name for name in names if len({one.get(name) for one in told}) > 1)
