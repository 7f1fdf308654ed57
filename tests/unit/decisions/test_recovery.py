"""The recovery decision, by example: two members, three runs, one block in two shards, one backup."""

from __future__ import annotations

from dataclasses import replace

from elastrain.decisions.recovery import decide, open_plan
from elastrain.job.placement import Holders
from elastrain.job.values import (
    Contribution,
    Findings,
    Initial,
    OpenWork,
    Record,
    Recovery,
    Report,
    Shape,
    ShardShape,
    TracedGraph,
    Unrecoverable,
)
from elastrain.job.world import Member, View
from elastrain.pipeline.graph import BlockGraph
from elastrain.pipeline.planning import PlanWish, first_plan

SHAPE = Shape(
    runs=3, blocks=1, shards=(ShardShape(size_bytes=8, lanes=(0,)), ShardShape(size_bytes=8, lanes=(0,))), backups=1
)
BASE = (Holders("a", ("b",)), Holders("b", ("a",)))
RECORD = Record(step=1, generation=1, contribution=Contribution(), square_norm=0.0, skipped=False, switch=False)


def view(*names: str, generation: int = 2) -> View:
    return View(generation=generation, members=tuple(Member(id=name, node=name) for name in names))


def report(**changes: object) -> Report:
    plain = Report(
        wrong=None,
        committed=1,
        record=RECORD,
        base=BASE,
        parameters=(1, 1),
        held=((0, 1, ()), (1, 1, ())),
        begun=2,
        finishing=False,
        work=OpenWork(),
        own=((),),
        folded=(),
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


NEWCOMER = report(committed=-1, record=None, base=None, parameters=(-2, -2), held=(), begun=-1)


def recovery(**reports: Report) -> Recovery:
    decision = decide(view(*reports), reports, SHAPE)
    assert isinstance(decision, Recovery)
    return decision


def test_the_job_starts_with_the_parameters_of_rank_0() -> None:
    decision = decide(view("a", "b", generation=1), {"a": NEWCOMER, "b": NEWCOMER}, SHAPE)
    assert isinstance(decision, Recovery)
    assert decision.committed == -1
    assert decision.lacking == {"a": (), "b": (0, 1)}
    assert decision.newcomers == () and decision.donor is None
    assert decision.runs == {"a": (0, 1), "b": (2,)}
    assert {holders.primary for holders in decision.now} == {"a", "b"}


RESUMED = replace(SHAPE, initial=Initial(step=1, is_stored=True))


def test_a_stored_initial_state_is_read_by_each_and_has_no_source() -> None:
    fresh = report(record=None, base=None, parameters=(-2, -2), held=(), begun=-1)
    decision = decide(view("a", "b", generation=1), {"a": fresh, "b": fresh}, RESUMED)
    assert isinstance(decision, Recovery)
    assert decision.committed == 1
    assert decision.source is None and decision.newcomers == ()
    assert decision.runs == {"a": (0, 1), "b": (2,)}


def test_before_the_first_commit_of_a_resumed_job_the_loss_of_a_holder_loses_nothing() -> None:
    alone = replace(RESUMED, backups=0)
    left = report(base=(Holders("a"), Holders("b")), held=((1, 1, ()),), begun=2)
    decision = decide(view("b"), {"b": left}, alone)
    assert isinstance(decision, Recovery)
    assert decision.now == (Holders("b"), Holders("b"))


def test_after_it_the_loss_of_the_only_holder_is_the_loss_of_the_state() -> None:
    alone = replace(RESUMED, backups=0)
    left = report(committed=2, base=(Holders("a"), Holders("b")), parameters=(2, 2), held=((1, 2, ()),), begun=3)
    decision = decide(view("b"), {"b": left}, alone)
    assert isinstance(decision, Unrecoverable) and decision.shards == (0,)


def test_newcomers_by_themselves_do_not_begin_the_job_anew() -> None:
    begun = replace(view("x", "y"), begun=True)
    decision = decide(begun, {"x": NEWCOMER, "y": NEWCOMER}, SHAPE)
    assert isinstance(decision, Unrecoverable)
    assert "no member of the job is left" in decision.reason


def test_newcomers_by_themselves_begin_a_job_that_has_not_begun() -> None:
    decision = recovery(x=NEWCOMER, y=NEWCOMER)
    assert (decision.committed, decision.source) == (-1, "x")
    assert {holders.primary for holders in decision.now} == {"x", "y"}


INITIAL = replace(NEWCOMER, base=BASE, parameters=(-1, -1), begun=0)
"""It has the initial parameters of the one that began the job."""


def test_initial_parameters_come_from_who_has_them_where_the_first_of_all_is_lost() -> None:
    decision = recovery(c=NEWCOMER, b=INITIAL)
    assert decision.source == "b"
    assert decision.lacking == {"c": (0, 1), "b": ()}


def test_loss_of_all_holders_of_a_shard_before_the_first_commit_loses_no_state() -> None:
    alone = (Holders("a"), Holders("b"))
    decision = recovery(b=replace(INITIAL, base=alone), c=replace(INITIAL, base=alone))
    assert [holders.primary for holders in decision.now] == ["c", "b"]  # who lives keeps what it has


def test_a_survivor_takes_over_and_the_lost_runs_are_handed_out_again() -> None:
    decision = recovery(a=report(own=(((0, 1),),), folded=((0, 0, ((0, 2),)),)))
    assert decision.now == (Holders("a"), Holders("a"))
    # Shard 0 has runs 0 and 1; shard 1, whose primary died, has nothing: what nobody has is 1 for it, and 2 for both.
    assert decision.runs == {"a": (1, 2)}
    assert decision.redone == 2
    assert "step 1 is the highest committed one; 2 of 3 runs handed out" in decision.reason


def test_who_is_behind_completes_the_highest_commit_first() -> None:
    late = report(
        committed=0,
        record=replace(RECORD, step=0),
        parameters=(0, 0),
        held=((0, 0, (1,)), (1, 0, (1,))),
        work=OpenWork(pending=(0,)),
        folded=((0, 0, ((0, 3),)),),  # of the step that is now known to be committed
    )
    decision = recovery(a=late, b=report())
    assert (decision.committed, decision.record) == (1, RECORD)
    assert decision.lacking == {"a": (0, 1), "b": ()}
    assert decision.folded[0, 0] == frozenset()
    assert sorted(run for runs in decision.runs.values() for run in runs) == [0, 1, 2]


def test_a_holder_that_can_not_make_the_commit_is_none() -> None:
    blind = report(committed=0, parameters=(0, 0), held=((0, 0, ()), (1, 0, ())))
    assert recovery(a=blind, b=report()).now == (Holders("b"), Holders("b"))


def test_a_gradient_that_is_kept_needs_no_runs() -> None:
    decision = recovery(a=report(held=((0, 1, (2,)), (1, 1, (2,)))))
    assert decision.redone == 0
    assert decision.folded[1, 0] == {(0, 3)}


def test_a_newcomer_gets_parameters_and_loop_state_and_a_share_of_what_is_left() -> None:
    decision = recovery(a=report(work=OpenWork(pending=(0, 1, 2), fixed=1)), n=NEWCOMER)
    assert decision.lacking["n"] == (0, 1)
    assert (decision.newcomers, decision.donor) == (("n",), "a")
    assert decision.runs == {"a": (0, 1), "n": (2,)}
    assert decision.redone == 0


def test_a_run_that_two_report_stays_where_it_is_under_way() -> None:
    decision = recovery(
        a=report(work=OpenWork(pending=(0, 1), fixed=1)), b=report(work=OpenWork(pending=(2, 1), fixed=2))
    )
    assert decision.runs == {"a": (0,), "b": (2, 1)}


def test_a_shard_without_holders_is_said_to_be_lost_with_its_holders_and_the_way_on() -> None:
    decision = decide(view("n"), {"n": replace(report(), held=((0, 1, ()),))}, SHAPE)
    assert isinstance(decision, Unrecoverable)
    assert decision.shards == (0, 1)  # n is in no role: what it has was never verified
    assert "all holders of shard 0, 1 are gone (a, b); the last committed step is 1" in decision.reason
    assert "only a durable checkpoint can bring its state back" in decision.reason


def test_many_lost_shards_are_not_all_listed() -> None:
    shape = replace(SHAPE, shards=SHAPE.shards * 5)
    lost = decide(view("n"), {"n": report(base=BASE * 5, parameters=(1,) * 10, held=())}, shape)
    assert isinstance(lost, Unrecoverable)
    assert "shard 0, 1, 2, 3, 4, 5, 6, 7 …" in lost.reason


def test_a_straggler_gets_fewer_of_the_runs_by_the_speeds_of_the_newest_record() -> None:
    slow, record = view("a", "b"), replace(RECORD, findings=Findings(speeds=(("a", 25),)))
    fresh = decide(slow, {"a": report(record=record), "b": report(record=record)}, SHAPE)
    assert isinstance(fresh, Recovery)
    assert fresh.runs == {"a": (), "b": (0, 1, 2)}
    # What it had been given before is taken from it again.
    moved = decide(
        slow,
        {
            "a": report(record=record, work=OpenWork(pending=(0, 1), fixed=1)),
            "b": report(record=record, work=OpenWork(pending=(2,))),
        },
        SHAPE,
    )
    assert isinstance(moved, Recovery)
    assert moved.runs == {"a": (0,), "b": (2, 1)}


def test_the_first_plan_stays_while_somebody_lives_who_has_traced() -> None:
    graph = BlockGraph(blocks=("b0", "b1"), flops=(1, 1), crossings=((),) * 3)
    plan = first_plan(graph, ["a", "b"], PlanWish(stages=2, runs=3))
    traced = TracedGraph(graph=graph, places=(0,))
    heard = replace(NEWCOMER, work=OpenWork(plan=plan))
    decision = recovery(a=NEWCOMER, b=heard)
    # By a plan of members that are lost newcomers get no task before they have traced: they make another one then.
    assert open_plan(decision, {"a": NEWCOMER, "b": heard}, None) is None
    assert open_plan(decision, {"a": replace(NEWCOMER, work=OpenWork(traced=traced)), "b": heard}, None) == plan
