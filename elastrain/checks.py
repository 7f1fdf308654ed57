"""Which micro-batches two members compute, to see that both get the same; and what to say where they do not.

Pure functions of the view, of who computes what, and of what came out. One micro-batch of each member's, the first of
its first run, is its *probe*; its neighbour computes it again after its own runs, when state that the forward carries
along has moved on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from elastrain.values import Check

_NAMED = 3
"""So many blocks are named; of the others only the number."""
_CAUSES = (
    "a micro-batch has to be a function of parameters, data and step alone, whoever computes it. Usual causes: "
    "a random generator of one's own in forward or dataset (torch.Generator, numpy.random.default_rng: draw from the "
    "default ones, which are seeded per micro-batch); a counter, tensor or buffer that is carried from one micro-batch "
    "to the next; another order of a set (PYTHONHASHSEED); another processor or thread count; "
    "a kernel without a fixed order (torch.use_deterministic_algorithms(True) finds it)"
)


def is_due(step: int, every: int) -> bool:
    """Whether all members check each other in `step`: in the first, and in each `every`-th unless it is 0."""
    return step == 0 or (every > 0 and step % every == 0)


def probes(runs: Mapping[str, Sequence[int]], newcomers: Collection[str] | None = None) -> dict[str, int]:
    """Owner -> the run that begins with its probe. `runs`: all of the step, by member in rank order.

    With `newcomers` only they are checked, against members that have been there before.
    """
    firsts = {member: todo[0] for member, todo in runs.items() if todo}
    if newcomers is None:
        return firsts
    theirs = {member: run for member, run in firsts.items() if member not in newcomers}
    wanted = {neighbour(newcomer, tuple(runs), theirs) for newcomer in newcomers}
    return {member: run for member, run in theirs.items() if member in wanted}


def neighbour(me: str, members: Sequence[str], owners: Collection[str]) -> str | None:
    """The next member after `me`, in a ring, that has a probe; None if there is no other."""
    at = members.index(me)
    return next((m for m in (*members[at + 1 :], *members[:at]) if m in owners), None)


def difference(step: int, told: Mapping[str, Sequence[Check]], blocks: Sequence[str]) -> str:
    """One sentence where two members had different results of one micro-batch; empty if there are none.

    `told`: by member in rank order. A NaN equals a NaN.
    """
    first: dict[int, tuple[str, Check]] = {}
    pairs: list[tuple[str, Check, str, Check]] = []
    for member, checks in told.items():
        for check in checks:
            before, other = first.setdefault(check.micro_batch, (member, check))
            if repr(other) != repr(check):
                pairs.append((before, other, member, check))
    if not pairs:
        return ""
    one, left, two, right = pairs[0]
    more = "".join(f", micro-batch {a.micro_batch} on {m} and {n}" for m, a, n, _ in pairs[1:])
    return (
        f"micro-batch {left.micro_batch} of step {step} came out differently on {one} and {two} "
        f"({_what_differs(left, right, blocks)}){more}: {_CAUSES}"
    )


def _what_differs(left: Check, right: Check, blocks: Sequence[str]) -> str:
    pairs = enumerate(zip(left.digests, right.digests, strict=True))
    differing = [_named(block, blocks) for block, (ours, theirs) in pairs if ours != theirs]
    more = len(differing) - _NAMED
    parts = []
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
