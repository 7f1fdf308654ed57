"""The recovery decision: the same on every member, exact about what is missing, never below what was committed."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastrain.decisions.recovery import decide
from elastrain.job.fold import Fold, leaves
from elastrain.job.placement import target
from elastrain.job.values import Contribution, OpenWork, Record, Recovery, Report, Shape, ShardShape, Unrecoverable
from elastrain.job.world import Member, View

seeds_st = st.randoms(use_true_random=False)


def shape_of(runs: int, backups: int) -> Shape:
    shards = (ShardShape(size_bytes=8, lanes=(0,)), ShardShape(size_bytes=8, lanes=(1,)))
    return Shape(runs=runs, blocks=2, shards=(*shards, ShardShape(size_bytes=8, lanes=(0, 1))), backups=backups)


def record_of(step: int) -> Record:
    return Record(step=step, generation=1, contribution=Contribution(), square_norm=1.0, skipped=False, switch=False)


def world(rng: random.Random, runs: int, backups: int) -> tuple[View, dict[str, Report], Shape]:
    """Survivors of a view that was interrupted between any two points of step 4 or 5, and perhaps a newcomer."""
    shape = shape_of(runs, backups)
    names = [f"m{i}" for i in range(rng.randint(2, 6))]
    base = target([None] * 3, shape.sizes, {name: name for name in names}, backups)
    lost = set(rng.sample(names, rng.randint(0, min(backups, len(names) - 1))))
    left = [name for name in names if name not in lost]
    committed = 4
    ahead = {name for name in left if rng.random() < 0.7} or {left[0]}
    reports: dict[str, Report] = {}
    todo = list(range(runs))
    rng.shuffle(todo)
    fold = Fold(runs)
    for index, name in enumerate(left):
        mine = sorted(todo[index :: len(names)])
        done = mine[: rng.randint(0, len(mine))]
        passed = name in ahead
        held = [
            (s, committed if passed else committed - 1, () if passed else (committed,))
            for s, h in enumerate(base)
            if name in h.all
        ]
        reports[name] = Report(
            wrong=None,
            committed=committed if passed else committed - 1,
            record=record_of(committed if passed else committed - 1),
            base=base,
            parameters=tuple(rng.choice([committed, committed - 1]) if passed else committed - 1 for _ in range(3)),
            held=tuple(held),
            begun=committed,
            finishing=False,
            work=OpenWork(
                pending=tuple(run for run in mine if run not in done) if passed else (), fixed=rng.randint(0, 1)
            ),
            own=tuple(fold.cover(done) if passed else () for _ in range(2)),
            folded=tuple((s, 0, fold.cover(done)) for s, h in enumerate(base) if passed and h.primary == name),
        )
    if rng.random() < 0.5:
        reports["new"] = newcomer(shape)
    members = tuple(Member(id=name, node=name) for name in reports)
    return View(generation=2, members=members), reports, shape


def newcomer(shape: Shape) -> Report:
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


def decided(view: View, reports: dict[str, Report], shape: Shape) -> Recovery:
    decision = decide(view, reports, shape)
    assert isinstance(decision, Recovery)
    return decision


@given(rng=seeds_st, runs=st.integers(1, 16), backups=st.integers(0, 2))
def test_the_order_in_which_reports_come_in_does_not_matter(rng: random.Random, runs: int, backups: int) -> None:
    view, reports, shape = world(rng, runs, backups)
    first = decide(view, reports, shape)
    for _ in range(3):
        items = list(reports.items())
        rng.shuffle(items)
        assert decide(view, dict(items), shape) == first


@given(rng=seeds_st, runs=st.integers(1, 16), backups=st.integers(0, 2))
def test_the_highest_committed_step_is_completed_by_holders_that_can(
    rng: random.Random, runs: int, backups: int
) -> None:
    view, reports, shape = world(rng, runs, backups)
    decision = decided(view, reports, shape)
    assert decision.committed == max(report.committed for report in reports.values())
    assert decision.record == record_of(decision.committed)
    for shard, holders in enumerate(decision.now):
        versions = {s: (version, kept) for s, version, kept in reports[holders.primary].held}
        version, kept = versions[shard]
        assert version == decision.committed or (version == decision.committed - 1 and decision.committed in kept)


@given(rng=seeds_st, runs=st.integers(1, 16), backups=st.integers(0, 2))
def test_exactly_the_runs_that_nobody_has_are_handed_out_again(rng: random.Random, runs: int, backups: int) -> None:
    view, reports, shape = world(rng, runs, backups)
    decision = decided(view, reports, shape)
    current = [report for report in reports.values() if report.committed == decision.committed]
    pending = {run for report in current for run in report.work.pending}
    handed = [run for todo in decision.runs.values() for run in todo]
    assert len(handed) == len(set(handed))
    missing = set()
    for (shard, lane), nodes in decision.folded.items():
        block = shape.shards[shard].lanes[lane]
        has = leaves(nodes) | leaves(node for report in current for node in report.own[block]) | pending
        missing |= set(range(runs)) - has
    assert set(handed) == pending | missing
    assert decision.redone == len(missing)


@given(rng=seeds_st, runs=st.integers(1, 16), backups=st.integers(0, 2))
def test_what_is_under_way_stays_where_it_is(rng: random.Random, runs: int, backups: int) -> None:
    view, reports, shape = world(rng, runs, backups)
    decision = decided(view, reports, shape)
    for member, report in reports.items():
        if report.committed == decision.committed:
            head = report.work.pending[: report.work.fixed]
            assert decision.runs[member][: len(head)] == head


@given(rng=seeds_st, runs=st.integers(2, 16))
def test_a_run_that_two_report_is_done_once_unless_both_have_begun(rng: random.Random, runs: int) -> None:
    view, reports, shape = world(rng, runs, 1)
    current = [m for m in view.ids if reports[m].committed == 4]
    for member in current:
        reports[member] = replace(reports[member], work=OpenWork(pending=tuple(range(runs)), fixed=rng.randint(0, 2)))
    decision = decided(view, reports, shape)
    for run in range(runs):
        doers = [m for m in view.ids if run in decision.runs[m]]
        begun = [m for m in current if run in reports[m].work.pending[: reports[m].work.fixed]]
        assert doers == begun if len(begun) > 1 else len(doers) == 1


@given(rng=seeds_st, runs=st.integers(1, 16), backups=st.integers(0, 2))
def test_parameters_are_published_to_all_who_lack_them(rng: random.Random, runs: int, backups: int) -> None:
    view, reports, shape = world(rng, runs, backups)
    decision = decided(view, reports, shape)
    for member, report in reports.items():
        lacks = tuple(s for s, version in enumerate(report.parameters) if version != decision.committed)
        assert decision.lacking[member] == lacks
    assert decision.newcomers == tuple(m for m in view.ids if m == "new")
    assert (decision.donor is not None) == bool(decision.newcomers)


@given(rng=seeds_st, runs=st.integers(1, 8), backups=st.integers(0, 2))
def test_a_shard_is_lost_if_and_only_if_no_holder_reports_it(rng: random.Random, runs: int, backups: int) -> None:
    view, reports, shape = world(rng, runs, backups)
    robbed = rng.randrange(3)
    for member, report in reports.items():
        reports[member] = replace(report, held=tuple(held for held in report.held if held[0] != robbed))
    decision = decide(view, reports, shape)
    assert isinstance(decision, Unrecoverable)
    assert decision.shards == (robbed,)
    assert f"all holders of shard {robbed} are gone" in decision.reason
