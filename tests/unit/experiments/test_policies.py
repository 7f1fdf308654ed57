"""The policies of the experiment: each reproduces something that its paper states, and none is better than ours."""

from __future__ import annotations

import math

import pytest

from experiments.pipeline.policies import (
    EVEN,
    SHAPES,
    UNIT_BYTES,
    Case,
    before,
    cases,
    drop,
    figures_of,
    ours,
    played,
    re_route,
    table,
    templates,
)


def case(pipelines: int, length: int, *struck: str, runs_each: int = 2, is_slow: bool = False) -> Case:
    return Case(
        shape=EVEN,
        pipelines=pipelines,
        length=length,
        runs_each=runs_each,
        struck=frozenset(struck),
        is_slow=is_slow,
    )


def test_re_routing_hides_the_first_loss_in_the_bubbles_of_plain_one_f_one_b() -> None:
    undisturbed = case(4, 6)
    plain_s = undisturbed.timeline().step_s(undisturbed.even_plan(is_split=False))
    assert plain_s / re_route(case(4, 6, "m7")) > 0.95


def test_re_routing_cannot_go_on_without_any_replica_of_a_block() -> None:
    assert re_route(case(2, 6, "m1", "m7")) == math.inf
    assert math.isfinite(re_route(case(2, 6, "m1", "m8")))


def test_dropping_one_of_four_replicas_leaves_three_quarters_of_the_throughput() -> None:
    undisturbed_s, after_s = drop(case(4, 3, runs_each=4)), drop(case(4, 3, "m4", runs_each=4))
    assert undisturbed_s / after_s == pytest.approx(3 / 4, abs=0.03)
    assert drop(case(2, 2, "m0", "m2")) == math.inf


def test_templates_use_all_members_that_are_left() -> None:
    assert templates(case(4, 3, "m4")) < drop(case(4, 3, "m4"))


def test_a_member_has_room_for_one_and_a_half_times_its_share_of_blocks() -> None:
    assert set(case(3, 4).memory.limits_bytes.values()) == {15 * UNIT_BYTES + UNIT_BYTES // 2}


@pytest.mark.parametrize("pipelines", [2, 4, 6])
def test_ours_is_no_worse_than_any_other_policy(pipelines: int) -> None:
    rows = [played(case(pipelines, 3, "m1")), played(case(pipelines, 3, "m1", "m5"))]
    assert all(row[name] > 0.999 for row in rows for name in ("recycle", "torchft", "oobleck"))


def test_slow_members_are_told_to_the_planner_only() -> None:
    slow = case(3, 4, "m5", runs_each=4, is_slow=True)
    row = played(slow)
    assert row["recycle"] > 1.5 and row["linear"] > 0.9
    assert ours(slow, before(slow)) < re_route(slow)


def test_cases_are_those_of_all_layouts_and_come_out_alike() -> None:
    found = list(cases(SHAPES[:1], 1))
    assert found == list(cases(SHAPES[:1], 1))
    assert len(found) == 14 * 2 * 3 and {len(each.struck) for each in found} <= set(range(1, 9))


def test_figures_and_table_leave_out_where_a_policy_cannot_go_on() -> None:
    rows = [played(case(2, 2, "m1")), played(case(2, 2, "m0", "m2"))]
    found = figures_of(rows, [played(case(2, 2, "m1", is_slow=True))])
    assert found["cannot_go_on_recycle"] == 1 and math.isfinite(found["vs_recycle"])
    assert "   2 cases: recycle" in next(iter(table(rows, lambda row: "all")))
