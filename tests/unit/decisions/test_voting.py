"""From votes to the commit record."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from elastrain.decisions.voting import Disagreement, InForce, combine_votes
from elastrain.job.checkpoint_plan import CheckpointVote
from elastrain.job.placement import Holders
from elastrain.job.scaling import LossScale, Scaler
from elastrain.job.streams import StreamMark
from elastrain.job.values import Contribution, Record, Shape, Vote
from elastrain.job.world import Member, View
from elastrain.pipeline.pipeline_plan import Pipeline, PipelinePlan
from elastrain.pipeline.planner.plan_vote import PlanVote

VIEW = View(generation=5, members=(Member(id="a", node="a"), Member(id="b", node="b"), Member(id="c", node="c")))
TOLD = Contribution(3.0, 8.0, 8, 77)
SHAPE = Shape(runs=8, blocks=1, shards=(), backups=1)


def vote(**changes: object) -> Vote:
    plain = Vote(
        step=2,
        seen=5,
        contribution=TOLD,
        square_norms=(),
        roles=(),
        checks=(),
        before=(),
        checkpoint=CheckpointVote(),
        graph="",
        plan=None,
        settings='{"hyperparameters": 1, "teacher": 3}',
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def record_of(*votes: Vote) -> Record:
    record = combine_votes(2, VIEW, votes, shape=SHAPE)
    assert isinstance(record, Record)
    return record


def test_norms_are_added_in_shard_order_whoever_measured_them() -> None:
    norms = [1e16, 1.0, -1e16, 1.0]
    in_order = sum(norms)
    one = record_of(
        vote(square_norms=((0, norms[0]), (3, norms[3]))), vote(square_norms=((1, norms[1]), (2, norms[2])))
    )
    two = record_of(
        vote(square_norms=((2, norms[2]), (3, norms[3]))), vote(square_norms=((0, norms[0]), (1, norms[1])))
    )
    assert one.square_norm == two.square_norm == in_order


def test_the_record_carries_step_view_contribution_and_roles_in_shard_order() -> None:
    holders = Holders("a", ("b",))
    record = record_of(vote(roles=((3, holders),)), vote(roles=((1, holders),)))
    assert record == Record(
        step=2,
        generation=5,
        contribution=TOLD,
        square_norm=0.0,
        skipped=False,
        switch=False,
        roles=((1, holders), (3, holders)),
    )


def test_a_member_without_shards_has_nothing_to_say_about_the_contribution() -> None:
    assert record_of(vote(), vote(contribution=None)).contribution == TOLD


@pytest.mark.parametrize(("seen", "switch"), [((6, 6, 7), True), ((6, 5, 7), False), ((5, 5, 5), False)])
def test_the_view_changes_after_the_step_once_all_have_seen_a_newer_one(seen: tuple[int, ...], switch: bool) -> None:
    assert record_of(*(vote(seen=generation) for generation in seen)).switch is switch


@pytest.mark.parametrize(
    "told", [replace(TOLD, loss=math.nan), replace(TOLD, loss=math.inf), replace(TOLD, weight=0.0)], ids=repr
)
def test_a_step_without_a_finite_loss_or_without_weight_is_skipped(told: Contribution) -> None:
    assert record_of(vote(contribution=told), vote(contribution=told)).skipped


def test_a_step_with_an_infinite_norm_is_skipped() -> None:
    assert record_of(vote(square_norms=((0, math.inf),))).skipped


def test_what_differs_between_members_is_named_with_them() -> None:
    answer = combine_votes(
        2, VIEW, [vote(), vote(settings='{"hyperparameters": 1, "teacher": 4}'), vote()], shape=SHAPE
    )
    assert isinstance(answer, Disagreement)
    assert "members entered step 2 with different teacher: " in answer.reason


def test_different_contributions_are_a_disagreement() -> None:
    answer = combine_votes(2, VIEW, [vote(), vote(contribution=replace(TOLD, samples=7)), vote()], shape=SHAPE)
    assert isinstance(answer, Disagreement)
    assert "folded from different contributions" in answer.reason


def test_an_overflow_at_one_member_lowers_the_scale_in_the_one_record() -> None:
    rule, scaler = LossScale(growth_interval=10), Scaler(scale=512.0, clean_steps=4)
    votes = [vote(square_norms=((0, 1.0),)), vote(square_norms=((1, math.inf),)), vote()]
    record = combine_votes(2, VIEW, votes, shape=replace(SHAPE, loss_scale=rule), now=InForce(scaler=scaler))
    assert isinstance(record, Record)
    assert record.skipped
    assert record.scaler == scaler
    assert record.next_scaler == Scaler(scale=256.0)


def test_a_clean_step_counts_towards_a_larger_scale() -> None:
    rule, scaler = LossScale(growth_interval=10), Scaler(scale=512.0, clean_steps=9)
    record = combine_votes(
        2, VIEW, [vote(), vote(), vote()], shape=replace(SHAPE, loss_scale=rule), now=InForce(scaler=scaler)
    )
    assert isinstance(record, Record)
    assert (record.skipped, record.next_scaler) == (False, Scaler(scale=1024.0))


def test_members_that_have_traced_different_graphs_do_not_go_on() -> None:
    found = combine_votes(2, VIEW, (vote(graph="1f"), vote(graph="1f"), vote(graph="2e")), shape=SHAPE)
    assert isinstance(found, Disagreement)
    assert "different block graphs in step 2" in found.reason and "c: 2e" in found.reason


def test_the_plan_is_the_first_that_is_proposed_else_it_stays() -> None:
    plan = PipelinePlan(blocks=1, pipelines=(Pipeline(members=("a",), cuts=(), share=8, limits=(1,)),))
    proposed = combine_votes(2, VIEW, (vote(plan=PlanVote(proposed=plan)), vote(plan=PlanVote()), vote()), shape=SHAPE)
    stays = combine_votes(2, VIEW, (vote(), vote(), vote()), shape=SHAPE, now=InForce(plan=plan))
    assert isinstance(proposed, Record) and isinstance(stays, Record)
    assert proposed.plan == plan
    assert stays.plan == plan.digest, "all members know it"
    assert record_of(vote(), vote(), vote()).plan is None


def test_the_record_has_one_mark_of_each_stream_that_a_member_has_read() -> None:
    first, second = (StreamMark(stream=s, position=4, state="", digest="d") for s in (0, 1))
    record = record_of(vote(marks=(second,)), vote(marks=(first, second)), vote())
    assert record.findings.marks == (first, second)


@pytest.mark.parametrize("full", [(), ("a",), ("b",), ("a", "b", "c")])
def test_speeds_are_agreed_upon_only_while_every_member_has_room_for_any_share(full: tuple[str, ...]) -> None:
    told = {"a": 0.1, "b": 0.5, "c": 0.1}
    votes = [vote(plan=PlanVote(micro_batch_s=took_s, is_full=m in full)) for m, took_s in told.items()]
    record = combine_votes(2, VIEW, votes, shape=SHAPE, now=InForce(speeds={"b": 20}))
    assert isinstance(record, Record)
    assert bool(record.findings.speeds) == (not full), "also speeds that were in force"
