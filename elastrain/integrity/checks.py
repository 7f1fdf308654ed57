"""Cross-checks: the choice of micro-batches that two members compute, and sentences about differing results. Pure.

A member's *probe* is one of its micro-batches: the first of its last run. Its neighbour computes the probe again after
its own runs. Results depend only on the view, the distribution of runs, and the members' checks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastrain.job.values import Check

# A model has hundreds of blocks, and usually all from one block on differ. A few names show where it began.
_NAMED = 3
"""Number of differing blocks that a sentence names; it only counts the others."""
_CAUSES = (
    "a micro-batch has to be a function of parameters, data and step alone, on any member. Usual causes: "
    "a random generator of one's own in forward or dataset (torch.Generator, numpy.random.default_rng: draw from the "
    "default ones, which are seeded per micro-batch); a counter, tensor or buffer that is carried from one micro-batch "
    "to the next; another order of a set (PYTHONHASHSEED); another processor or thread count; "
    "a kernel without a fixed order (torch.use_deterministic_algorithms(True) finds it). "
    "`elastrain doctor --bits SCRIPT` names the module in which it begins"
)


@dataclass(frozen=True)
class Due:
    """Steps in which all members check each other: the job's first one, and every `every`-th unless that is 0."""

    first: int
    every: int

    def is_in(self, step: int) -> bool:
        """Return True if members check each other in this step."""
        # The first step finds a script that is not a function of (parameters, data, step) before much time is spent. In
        # a resumed job it is also the first step on possibly other machines.
        return step == self.first or (self.every > 0 and step % self.every == 0)


def probes(runs: Mapping[str, Sequence[int]], newcomers: Collection[str] | None = None) -> dict[str, int]:
    """Choose the probes, as owner -> the run that its probe begins.

    runs: all runs of the step, by member in rank order.
    newcomers: check only these, each against a member that was there before; None checks all members.
    """
    # The first micro-batch of a run: the slot is empty there, so its gradient is that of the micro-batch alone. Of the
    # last run: with even shares, its checker has then computed one run more, not a whole share more. After a whole
    # share, state that alternates between micro-batches could be as it was.
    firsts = {member: todo[-1] for member, todo in runs.items() if todo}
    if newcomers is None:
        return firsts
    # Two newcomers on one wrong machine could agree with each other: only an older member's probe proves something.
    theirs = {member: run for member, run in firsts.items() if member not in newcomers}
    wanted = {neighbour(newcomer, tuple(runs), theirs) for newcomer in newcomers}
    return {member: run for member, run in theirs.items() if member in wanted}


def neighbour(me: str, members: Sequence[str], owners: Collection[str]) -> str | None:
    """Return the next member after `me`, in a ring, that has a probe; None if there is no other."""
    # A ring spreads the checks over all members, so that each computes at most one.
    at = members.index(me)
    return next((m for m in (*members[at + 1 :], *members[:at]) if m in owners), None)


def difference(step: int, told: Mapping[str, Sequence[Check]], blocks: Sequence[str]) -> str:
    """Return a sentence, with usual causes, about two members' differing results for one micro-batch; empty if equal.

    told: the checks of each member, in rank order, so that every member builds the same sentence.
    """
    found = what_differs(step, told, blocks)
    return f"{found}: {_CAUSES}" if found else ""


def what_differs(step: int, told: Mapping[str, Sequence[Check]], blocks: Sequence[str]) -> str:
    """Return the sentence of `difference` without the usual causes."""
    first: dict[int, tuple[str, Check]] = {}
    pairs: list[tuple[str, Check, str, Check]] = []
    for member, checks in told.items():
        for check in checks:
            before, other = first.setdefault(check.micro_batch, (member, check))
            # Compared as text, so that a NaN equals a NaN: a step with NaN is skipped by all members and is no
            # difference.
            if repr(other) != repr(check):
                pairs.append((before, other, member, check))
    if not pairs:
        return ""
    one, left, two, right = pairs[0]
    more = "".join(f", micro-batch {a.micro_batch} on {m} and {n}" for m, a, n, _ in pairs[1:])
    kept = ", ".join(map(repr, sorted({*left.kept, *right.kept})))
    more += f"; forwards change {kept} of the model" if kept else ""
    return (
        f"micro-batch {left.micro_batch} of step {step} came out differently on {one} and {two} "
        f"({_results_differ(left, right, blocks)}){more}"
    )


def _results_differ(left: Check, right: Check, blocks: Sequence[str]) -> str:
    pairs = enumerate(zip(left.digests, right.digests, strict=True))
    differing = [_named(block, blocks) for block, (ours, theirs) in pairs if ours != theirs]
    more = len(differing) - _NAMED
    parts = []
    # The loss first: if it differs, the cause is in forward, and the gradients only follow.
    for name in ("loss", "weight"):
        ours, theirs = getattr(left, name), getattr(right, name)
        if repr(ours) != repr(theirs):
            parts.append(f"{name} {ours!r} against {theirs!r}")
    mine, other = dict(left.sums), dict(right.sums)
    for name in sorted(mine.keys() | other.keys()):
        if repr(mine.get(name)) != repr(other.get(name)):
            parts.append(f"step.add({name!r}, …) {mine.get(name)} against {other.get(name)}")
    if differing:
        count = f"{len(differing)} of {len(left.digests)} blocks"
        parts.append(
            f"gradients of {count}: {', '.join(differing[:_NAMED])}" + (f" and {more} more" if more > 0 else "")
        )
    return "; ".join(parts)


def _named(block: int, blocks: Sequence[str]) -> str:
    return repr(blocks[block]) if block < len(blocks) and blocks[block] else f"block {block}"
