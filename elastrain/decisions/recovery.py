"""Decides what a new view does first: one pure function of the reports of all its members.

Every member gets the same reports and so comes to the same decision; nobody leads. The order of what follows is told in
docs/index.md, "One failure".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from elastrain.job.fold import Node, leaves
from elastrain.job.placement import Holders, Placement, effective, target
from elastrain.job.run_plan import assign, level
from elastrain.job.values import Accusation, OpenWork, Recovery, Report, Shape, Unrecoverable
from elastrain.job.world import View
from elastrain.pipeline.pipeline_plan import PipelinePlan

_NEWCOMERS_ONLY = (
    "nobody of the job is left: all members of this view came later, and only a durable checkpoint can bring its state "
    "back"
)


def decide(view: View, reports: Mapping[str, Report], shape: Shape) -> Recovery | Unrecoverable:
    """Decide for all members of `view`, whichever of them asks. `reports` has an entry for each of them.

    Returns Unrecoverable, with a sentence, where a shard has no holder left that has or can make its state.
    """
    # Rank order, wherever one of several equals has to be chosen: the same on every member.
    members = view.ids
    # A step that any member has passed is committed, and can never be undone: nobody goes on from an older one.
    committed = max(reports[m].committed for m in members)
    if view.begun and not any(reports[m].base for m in members):
        # Newcomers by themselves would begin the job anew, and nobody would notice that its state was lost.
        return Unrecoverable(shards=tuple(range(len(shape.shards))), reason=_NEWCOMERS_ONLY)
    # Only a member that has passed the step knows who its holders are; of these any tells the same.
    leader = next((m for m in members if reports[m].committed == committed and reports[m].base), members[0])
    # A state that all can make, or read, is nobody's to lose: until the first commit of the job that is all of it.
    is_initial = committed == shape.initial.step
    base = _initial(view, reports[leader].base, shape) if is_initial else reports[leader].base
    assert base is not None
    wrong, reports = _what_counts(reports, committed)
    able, lost = (base, ()) if is_initial else _able_holders(view, reports, base, committed, wrong or ())
    if lost:
        return Unrecoverable(shards=lost, reason=_lost_sentence(lost, base, committed))
    # What is left to do: not what some primary has, nor what survivors have computed, nor what they are computing.
    folded = _folded(reports, able, shape, committed)
    fixed = {m: reports[m].work.fixed if reports[m].committed == committed else 0 for m in members}
    pending = _once({m: _pending(reports[m], committed) for m in members}, fixed)
    missing = _missing(reports, shape, folded, pending, committed)
    extra = assign(missing, {m: len(pending[m]) for m in members}, view.quotas)
    runs = level({m: (*pending[m], *extra[m]) for m in members}, fixed, view.quotas)
    source = _source(members, reports) if is_initial and not shape.initial.is_stored else None
    return Recovery(
        committed=committed,
        record=reports[leader].record,
        base=base,
        now=able,
        source=source,
        lacking={m: _lacking(reports[m], committed, wrong or (), is_source=m == source) for m in members},
        newcomers=() if is_initial else tuple(m for m in members if reports[m].begun < 0),
        runs=runs,
        redone=len(missing),
        folded=folded,
        reason=f"step {committed} is the highest committed one; {len(missing)} of {shape.runs} runs handed out",
        wrong=wrong,
    )


def open_plan(decision: Recovery, reports: Mapping[str, Report]) -> PipelinePlan | None:
    """Find who computes which blocks of the open step; None: whole runs, or the first step before all have traced."""
    if decision.record is not None:
        return decision.record.plan
    # All members that know one know the same: it is made in one view, and whoever comes to a later view with it brings
    # it to the others. Of a step that begins anew nothing is left that it would have to fit. Nor is it where all who
    # have traced are lost: newcomers can be given no task by their plan, and make another one once they have traced.
    if decision.wrong is not None or all(report.work.traced is None for report in reports.values()):
        return None
    return next((report.work.plan for report in reports.values() if report.work.plan is not None), None)


def accused(reports: Mapping[str, Report]) -> tuple[Accusation, ...]:
    """Whom members that report have seen to compute the open step wrongly."""
    # Of an older step, too: it was seen by votes, whatever has become of the step.
    told = [report.wrong for report in reports.values() if report.wrong is not None]
    return tuple(sorted({each for wrong in told for each in wrong.accused}))


def _what_counts(
    reports: Mapping[str, Report], committed: int
) -> tuple[tuple[tuple[int, str], ...] | None, Mapping[str, Report]]:
    """Collect what members know to be wrong of the open step (see `Wrong`); leave what counts all the same."""
    # Of a member that is a step behind nothing: what it has found wrong was committed without it, and so was right.
    told = [report.wrong for report in reports.values() if report.committed == committed]
    known = [wrong for wrong in told if wrong is not None]
    if not known:
        return None, reports
    wrong = tuple(sorted({pair for each in known for pair in each.parameters}))
    return wrong, {member: _voided(report, committed) for member, report in reports.items()}


def _voided(report: Report, committed: int) -> Report:
    """What is left of a report when nothing of the open step counts: states, as of the committed step."""
    # All of it, although mostly one partial is wrong: it is in sums already, and which of them is known to nobody.
    held = tuple((shard, version, tuple(s for s in kept if s <= committed)) for shard, version, kept in report.held)
    # Runs under way included: their loops are told, and give no result.
    return replace(report, own=(), folded=(), work=OpenWork(traced=report.work.traced), held=held)


def _initial(view: View, base: Placement | None, shape: Shape) -> Placement:
    """Place the initial state: before the first commit any member can make or read it, so none is lost."""
    now = effective(base, view.ids)[0] if base is not None else (None,) * len(shape.shards)
    fresh = target(now, shape.sizes, view.nodes, shape.backups)
    return tuple(left or new for left, new in zip(now, fresh, strict=True))


def _source(members: Sequence[str], reports: Mapping[str, Report]) -> str:
    """Name the member whose initial parameters are everybody's: the first that has those of an earlier source.

    Else the first in rank order.
    """
    # Scripts may make unequal initial models; once any member has computed with one, all have to keep to it.
    return next((m for m in members if set(reports[m].parameters) == {-1}), members[0])


def _able_holders(
    view: View, reports: Mapping[str, Report], base: Placement, committed: int, wrong: Collection[tuple[int, str]]
) -> tuple[tuple[Holders, ...], tuple[int, ...]]:
    """Find the living holders of each shard that have or can make the state of `committed`, and shards without any.

    The first of them is the primary. `wrong`: (shard, holder) of states that count for nothing.
    """
    held = {m: {shard: (version, kept) for shard, version, kept in reports[m].held} for m in view.ids}
    able: list[Holders] = []
    lost: list[int] = []
    for shard, holders in enumerate(base):
        living = [m for m in holders.all if m in held and (shard, m) not in wrong]
        left = [m for m in living if _can_serve(held[m].get(shard), committed)]
        if left:
            able.append(Holders(left[0], tuple(left[1:])))
        else:
            lost.append(shard)
    return tuple(able), tuple(lost)


def _can_serve(held: tuple[int, tuple[int, ...]] | None, committed: int) -> bool:
    # A backup keeps the gradient of a step until its own update is verified: with it, it can make the update now.
    return held is not None and (held[0] == committed or (held[0] == committed - 1 and committed in held[1]))


def _folded(
    reports: Mapping[str, Report], now: tuple[Holders, ...], shape: Shape, committed: int
) -> dict[tuple[int, int], frozenset[Node]]:
    """Find what each primary has of the next step, by (shard, lane)."""
    found: dict[tuple[int, int], frozenset[Node]] = {}
    for shard, holders in enumerate(now):
        report = reports[holders.primary]
        lanes = range(len(shape.shards[shard].lanes))
        if report.committed != committed:
            found.update({(shard, lane): frozenset() for lane in lanes})
            continue
        # A new primary that was a backup may keep the finished gradient: then the whole tree is there.
        finished = any(s == shard and committed + 1 in kept for s, _, kept in report.held)
        here = {lane: frozenset(nodes) for s, lane, nodes in report.folded if s == shard}
        root = frozenset([(0, shape.runs)])
        found.update({(shard, lane): root if finished else here.get(lane, frozenset()) for lane in lanes})
    return found


def _pending(report: Report, committed: int) -> tuple[int, ...]:
    # Runs that a member has to do for an older step are of no use to anybody.
    return report.work.pending if report.committed == committed else ()


def _once(pending: Mapping[str, tuple[int, ...]], fixed: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Leave a run that two members report with one of them, unless both are computing it.

    Two report it where one of them has not heard the last decision.
    """
    # What is under way cannot be taken away: the training loop computes it, and does not listen meanwhile.
    taken = {run for member, runs in pending.items() for run in runs[: fixed[member]]}
    once: dict[str, tuple[int, ...]] = {}
    for member, runs in pending.items():
        free = [run for run in runs[fixed[member] :] if run not in taken]
        taken.update(free)
        once[member] = (*runs[: fixed[member]], *free)
    return once


def _missing(
    reports: Mapping[str, Report],
    shape: Shape,
    folded: Mapping[tuple[int, int], frozenset[Node]],
    pending: Mapping[str, tuple[int, ...]],
    committed: int,
) -> tuple[int, ...]:
    """Find the runs that some shard still needs and that no member has or is about to compute."""
    # Of a step in pipelines whole runs are not handed out: `rerouting` says what is computed of it.
    if shape.pipelining is not None:
        return ()
    # By block: a member may have died in the middle of a backward, with the gradients of its last blocks handed over.
    computed = [
        frozenset().union(*(leaves(r.own[block]) for r in reports.values() if r.committed == committed and r.own))
        for block in range(shape.blocks)
    ]
    under_way = {run for runs in pending.values() for run in runs}
    missing: set[int] = set()
    for (shard, lane), nodes in folded.items():
        here = leaves(nodes) | computed[shape.shards[shard].lanes[lane]] | under_way
        missing |= set(range(shape.runs)) - here
    return tuple(sorted(missing))


def _lacking(report: Report, committed: int, wrong: Collection[tuple[int, str]], *, is_source: bool) -> tuple[int, ...]:
    # The source's parameters are right by definition.
    if is_source:
        return ()
    again = {shard for shard, _ in wrong}
    return tuple(shard for shard, version in enumerate(report.parameters) if version != committed or shard in again)


def _lost_sentence(lost: tuple[int, ...], base: Placement, committed: int) -> str:
    holders = sorted({holder for shard in lost for holder in base[shard].all})
    shards = ", ".join(map(str, lost[:8])) + (" …" if len(lost) > 8 else "")
    return (
        f"all holders of shard {shards} are gone ({', '.join(holders)}); the last committed step is {committed}, and "
        "only a durable checkpoint can bring its state back: more backups make such a loss rarer"
    )
