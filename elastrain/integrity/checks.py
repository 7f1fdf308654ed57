"""Chooses the micro-batches that two members compute, and says what differs where they got different results.

One micro-batch of each member's, the first of its last run, is its *probe*. Its neighbour computes the probe again
after its own runs. All functions are pure: of the view, of the hand-out of runs, and of what came out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elastrain.job.values import Check

# A model has hundreds of blocks, and usually all from some block on differ: a few say where it began.
_NAMED = 3
"""How many differing blocks a sentence names; of the others it gives the number."""
_CAUSES = (
    "a micro-batch has to be a function of parameters, data and step alone, whoever computes it. Usual causes: "
    "a random generator of one's own in forward or dataset (torch.Generator, numpy.random.default_rng: draw from the "
    "default ones, which are seeded per micro-batch); a counter, tensor or buffer that is carried from one micro-batch "
    "to the next; another order of a set (PYTHONHASHSEED); another processor or thread count; "
    "a kernel without a fixed order (torch.use_deterministic_algorithms(True) finds it)"
)


@dataclass(frozen=True)
class Due:
    """When all members check each other: in the job's first step, and in every `every`-th unless that is 0."""

    first: int
    every: int

    def is_in(self, step: int) -> bool:
        # The first step finds a script that is no function of (parameters, data, step), before anybody has trained
        # long; and in a resumed job it is the first on other machines, perhaps.
        return step == self.first or (self.every > 0 and step % self.every == 0)


def probes(runs: Mapping[str, Sequence[int]], newcomers: Collection[str] | None = None) -> dict[str, int]:
    """Choose the probes: owner -> the run that its probe begins.

    runs: all runs of the step, by member in rank order.
    newcomers: check only these, each against a member that was there before; None checks all members.
    """
    # The first micro-batch of a run: there the slot is empty, so that its gradient is that of the micro-batch alone. Of
    # the last run: where shares are even, who computes it again has computed one run more, and not a whole share, after
    # which what changes from one micro-batch to the next and back could be as it was.
    firsts = {member: todo[-1] for member, todo in runs.items() if todo}
    if newcomers is None:
        return firsts
    # Two newcomers on one wrong machine could agree with each other: only an older member's probe proves something.
    theirs = {member: run for member, run in firsts.items() if member not in newcomers}
    wanted = {neighbour(newcomer, tuple(runs), theirs) for newcomer in newcomers}
    return {member: run for member, run in theirs.items() if member in wanted}


def neighbour(me: str, members: Sequence[str], owners: Collection[str]) -> str | None:
    """Find the next member after `me`, in a ring, that has a probe; None if there is no other."""
    # A ring, so that the checks are spread over all members, and nobody computes more than one.
    at = members.index(me)
    return next((m for m in (*members[at + 1 :], *members[:at]) if m in owners), None)


def difference(step: int, told: Mapping[str, Sequence[Check]], blocks: Sequence[str]) -> str:
    """Say in one sentence where two members had different results of one micro-batch; empty if nowhere.

    told: what each member computed, by member in rank order, so that every member builds the same sentence.
    """
    found = what_differs(step, told, blocks)
    return f"{found}: {_CAUSES}" if found else ""


def what_differs(step: int, told: Mapping[str, Sequence[Check]], blocks: Sequence[str]) -> str:
    """As `difference`, without the usual causes."""
    first: dict[int, tuple[str, Check]] = {}
    pairs: list[tuple[str, Check, str, Check]] = []
    for member, checks in told.items():
        for check in checks:
            before, other = first.setdefault(check.micro_batch, (member, check))
            # Compared as text: a NaN must equal a NaN, since a step with NaN is skipped by all and no difference.
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
    # The loss first: where it differs, forward is to blame, and the gradients only follow.
    for name in ("loss", "weight"):
        ours, theirs = getattr(left, name), getattr(right, name)
        if repr(ours) != repr(theirs):
            parts.append(f"{name} {ours!r} against {theirs!r}")
    if differing:
        count = f"{len(differing)} of {len(left.digests)} blocks"
        parts.append(
            f"gradients of {count}: {', '.join(differing[:_NAMED])}" + (f" and {more} more" if more > 0 else "")
        )
    return "; ".join(parts)


def _named(block: int, blocks: Sequence[str]) -> str:
    return repr(blocks[block]) if block < len(blocks) and blocks[block] else f"block {block}"
