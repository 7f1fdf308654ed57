"""Decision about the first actions in a new view: one pure function of the reports of all its members.

Every member gets the same reports and so makes the same decision; there is no leader. docs/index.md, "One failure",
describes the order of the steps that follow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from elastrain.decisions.agreed_speeds import speeds_of
from elastrain.job.fold import Node, leaves
from elastrain.job.placement import Holders, Placement, effective, target
from elastrain.job.run_plan import Speeds, assign, level
from elastrain.job.values import Accusation, OpenWork, Recovery, Report, Shape, Unrecoverable
from elastrain.job.world import View
from elastrain.pipeline.pipeline_plan import PipelinePlan

_NEWCOMERS_ONLY = (
    "no member of the job is left: all members of this view came later, and only a durable checkpoint can bring its "
    "state back"
)


def decide(view: View, reports: Mapping[str, Report], shape: Shape) -> Recovery | Unrecoverable:
    """Decide for all members of `view`; each of them gets the same answer. `reports` has an entry for each of them.

    Returns Unrecoverable, with a reason, if no holder of a shard has its state or can make it.
    """
    # In rank order, wherever one of several equal members is chosen: the same one on every member.
    members = view.ids
    # A step that any member has passed is committed and can never be undone. No member continues from an older one.
    committed = max(reports[m].committed for m in members)
    if view.begun and not any(reports[m].base for m in members):
        # Newcomers alone would start the job again, and its lost state would go unnoticed.
        return Unrecoverable(shards=tuple(range(len(shape.shards))), reason=_NEWCOMERS_ONLY)
    # Only a member that has passed the step knows its holders. All such members know the same ones.
    leader = next((m for m in members if reports[m].committed == committed and reports[m].base), members[0])
    # Until the first commit nothing can be lost, because all members can make or read the initial state.
    is_initial = committed == shape.initial.step
    base = _initial(view, reports[leader].base, shape) if is_initial else reports[leader].base
    assert base is not None
    wrong, reports = _what_counts(reports, committed)
    able, lost = (base, ()) if is_initial else _able_holders(view, reports, base, committed, wrong or ())
    if lost:
        return Unrecoverable(shards=lost, reason=_lost_sentence(lost, base, committed))
    # The work left: runs that no primary has, and that no survivor has computed or is computing.
    folded = _folded(reports, able, shape, committed)
    fixed = {m: reports[m].work.fixed if reports[m].committed == committed else 0 for m in members}
    pending = _once({m: _pending(reports[m], committed) for m in members}, fixed)
    missing = _missing(reports, shape, folded, pending, committed)
    source = _source(members, reports) if is_initial and not shape.initial.is_stored else None
    return Recovery(
        committed=committed,
        record=reports[leader].record,
        base=base,
        now=able,
        source=source,
        lacking={m: _lacking(reports[m], committed, wrong or (), is_source=m == source) for m in members},
        newcomers=() if is_initial else tuple(m for m in members if reports[m].begun < 0),
        runs=_handed_out(missing, pending, fixed, speeds_of(reports[leader].record)),
        redone=len(missing),
        folded=folded,
        reason=f"step {committed} is the highest committed one; {len(missing)} of {shape.runs} runs handed out",
        wrong=wrong,
    )


def open_plan(decision: Recovery, reports: Mapping[str, Report], recorded: PipelinePlan | None) -> PipelinePlan | None:
    """Return the plan of the open step. `recorded`: the plan that the decision's record names.

    None: whole runs, or the first step before all members have traced the model.
    """
    if decision.record is not None:
        return recorded
    # The first step's plan is made in one view, and members bring it along to later views, so all that know one know
    # the same. It does not count if the step starts again, because nothing is left that it has to fit. It does not
    # count either if all members that traced are lost: newcomers cannot get tasks by it, and make another once they
    # have traced.
    if decision.wrong is not None or all(report.work.traced is None for report in reports.values()):
        return None
    return next((report.work.plan for report in reports.values() if report.work.plan is not None), None)


def accused(reports: Mapping[str, Report]) -> tuple[Accusation, ...]:
    """Return the accusations, known to the reporting members, of wrong results in the open step."""
    # Accusations from an older step count too: votes have shown them, whatever became of the step.
    told = [report.wrong for report in reports.values() if report.wrong is not None]
    return tuple(sorted({each for wrong in told for each in wrong.accused}))


def _what_counts(
    reports: Mapping[str, Report], committed: int
) -> tuple[tuple[tuple[int, str], ...] | None, Mapping[str, Report]]:
    """Collect the known errors of the open step (see `Wrong`), and return them with the reports that remain valid."""
    # A member that is a step behind does not count: the step that it found wrong was committed without it, so it was
    # right.
    told = [report.wrong for report in reports.values() if report.committed == committed]
    known = [wrong for wrong in told if wrong is not None]
    if not known:
        return None, reports
    wrong = tuple(sorted({pair for each in known for pair in each.parameters}))
    return wrong, {member: _voided(report, committed) for member, report in reports.items()}


def _voided(report: Report, committed: int) -> Report:
    """Return the report without its results of the open step. States of the committed step remain."""
    # All results go, although mostly one partial is wrong: it is part of sums already, and no member knows of which.
    held = tuple((shard, version, tuple(s for s in kept if s <= committed)) for shard, version, kept in report.held)
    # This includes runs under way: the loops are informed, and these runs give no result.
    return replace(report, own=(), folded=(), work=OpenWork(traced=report.work.traced), held=held)


def _initial(view: View, base: Placement | None, shape: Shape) -> Placement:
    """Place the initial state. Before the first commit any member can make or read it, so no shard is lost."""
    now = effective(base, view.ids)[0] if base is not None else (None,) * len(shape.shards)
    fresh = target(now, shape.sizes, view.nodes, shape.backups)
    return tuple(left or new for left, new in zip(now, fresh, strict=True))


def _source(members: Sequence[str], reports: Mapping[str, Report]) -> str:
    """Return the member whose initial parameters all members take.

    It is the first member that has parameters of an earlier source, else the first in rank order.
    """
    # Scripts may make unequal initial models. Once any member has computed with one, all have to use it.
    return next((m for m in members if set(reports[m].parameters) == {-1}), members[0])


def _able_holders(
    view: View, reports: Mapping[str, Report], base: Placement, committed: int, wrong: Collection[tuple[int, str]]
) -> tuple[tuple[Holders, ...], tuple[int, ...]]:
    """Return the living holders of each shard that have or can make the state of `committed`, and shards without any.

    The first holder is the primary. `wrong`: (shard, holder) of states that do not count.
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
    # A backup keeps the gradient of a step until its own update is verified. With it, it can make the update now.
    return held is not None and (held[0] == committed or (held[0] == committed - 1 and committed in held[1]))


def _folded(
    reports: Mapping[str, Report], now: tuple[Holders, ...], shape: Shape, committed: int
) -> dict[tuple[int, int], frozenset[Node]]:
    """Return the partials of the next step that each primary has, by (shard, lane)."""
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
    # Runs of an older step are useless, because that step is committed.
    return report.work.pending if report.committed == committed else ()


def _once(pending: Mapping[str, tuple[int, ...]], fixed: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Remove duplicates: leave a run that two members report with one of them, unless both are computing it.

    Two members report a run if one of them has not received the last decision.
    """
    # A run under way cannot be taken away: the training loop computes it and does not listen meanwhile.
    taken = {run for member, runs in pending.items() for run in runs[: fixed[member]]}
    once: dict[str, tuple[int, ...]] = {}
    for member, runs in pending.items():
        free = [run for run in runs[fixed[member] :] if run not in taken]
        taken.update(free)
        once[member] = (*runs[: fixed[member]], *free)
    return once


def _handed_out(
    missing: Sequence[int], pending: Mapping[str, tuple[int, ...]], fixed: Mapping[str, int], speeds: Speeds
) -> dict[str, tuple[int, ...]]:
    """Hand out the work left. `speeds`: those of the record that all members of the view go on from."""
    # Members that are a step behind, and newcomers, know other speeds or none.
    extra = assign(missing, {m: len(runs) for m, runs in pending.items()}, speeds)
    return level({m: (*runs, *extra[m]) for m, runs in pending.items()}, fixed, speeds)


def _missing(
    reports: Mapping[str, Report],
    shape: Shape,
    folded: Mapping[tuple[int, int], frozenset[Node]],
    pending: Mapping[str, tuple[int, ...]],
    committed: int,
) -> tuple[int, ...]:
    """Return the runs that some shard still needs and that no member has or is about to compute."""
    # In pipelines whole runs are not handed out: `rerouting` decides what is computed.
    if shape.pipelining is not None:
        return ()
    # By block: a member may have died in the middle of a backward, after it delivered the gradients of its last blocks.
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
