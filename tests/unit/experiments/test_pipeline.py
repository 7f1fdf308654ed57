"""The arithmetic of the experiment with pipelines, on journals made by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from experiments.pipeline import planner
from experiments.pipeline.figures import (
    actions,
    orphan_s,
    pairs,
    plan_in_force,
    redone_ratio,
    samples_amiss,
    standstill_s,
    step_s,
)
from experiments.pipeline.plot import apart
from tests.support.sources import ROOT

README = ROOT / "experiments" / "pipeline" / "README.md"


def task(kind: str, run: int, blocks: tuple[int, int], span: tuple[float, float], step: int = 2) -> dict[str, object]:
    where = {"run": run, "micro_batch": run, "begin": blocks[0], "end": blocks[1]}
    return {"event": "task", "step": step, "kind": kind, "started_s": span[0], "t": span[1], **where}


def passed(step: int, at_s: float, samples: int = 4) -> dict[str, object]:
    return {"event": "passed", "step": step, "t": at_s, "samples": samples, "fingerprint": 7}


def test_a_step_lasts_from_record_to_record_in_the_median() -> None:
    assert step_s([passed(0, 1.0), passed(1, 3.0), passed(2, 8.0), passed(3, 10.0)]) == 2.0


def test_the_best_of_whole_backwards_is_that_of_one_f_one_b_and_a_split_one_is_shorter() -> None:
    case = planner.Case(name="", count=4, plan=planner.ruled(4, 4, 16, is_split=False), window_s=0.05)
    assert planner.modelled_s(case, planner.Costs()) == pytest.approx((16 + 3) * 0.3)
    split = replace(case, plan=planner.ruled(4, 4, 16))
    assert planner.modelled_s(split, planner.Costs()) == pytest.approx((16 + 2) * 0.3)


def test_a_standstill_is_the_longest_time_in_which_no_survivor_computes() -> None:
    done = actions(
        {
            "m0": [task("forward", 0, (0, 2), (1.0, 5.0)), task("forward", 1, (0, 2), (5.3, 6.0))],
            "m1": [task("backward", 0, (2, 4), (5.0, 9.0))],
        }
    )
    assert standstill_s(done, ["m0"], since_s=4.0, until_s=9.0) == pytest.approx(0.3)
    assert standstill_s(done, ["m0", "m1"], since_s=4.0, until_s=9.0) == 0.0


def test_what_was_computed_twice_is_set_against_what_the_lost_member_had() -> None:
    lost = [task("backward", run, (0, 2), (run, run + 0.5)) for run in range(2)]
    done = actions({"m1": lost, "m0": [task("backward", 1, (0, 2), (5.0, 6.0))]})
    assert pairs(done, 2) == {(0, 0): 1, (1, 0): 1, (0, 1): 2, (1, 1): 2}
    assert redone_ratio(done, step=2, lost="m1") == 0.5


def test_steps_that_nobody_passed_and_samples_that_members_tell_apart() -> None:
    journals = {"m0": [passed(0, 1.0), passed(2, 3.0)], "m1": [passed(0, 1.0), passed(2, 3.0, samples=5)]}
    assert samples_amiss(journals, 3) == (1, 1)


def test_an_orphan_waits_until_another_member_begins_with_one_of_its_blocks() -> None:
    journals = {
        "m1": [task("forward", 0, (2, 4), (1.0, 2.0))],
        "m0": [
            {"event": "lost", "peer": "m1", "t": 3.0},
            task("forward", 1, (0, 2), (3.1, 3.2)),
            task("forward", 1, (2, 4), (3.5, 4.0)),
        ],
    }
    assert orphan_s(journals, step=2, lost="m1") == pytest.approx(0.5)
    assert orphan_s({}, step=2, lost="m1") is None


def test_a_forward_is_drawn_up_to_where_its_backward_begins_inside_of_it() -> None:
    done = actions(
        {
            "m1": [task("backward", 0, (2, 4), (3.0, 5.0)), task("forward", 0, (2, 4), (1.0, 5.0))],
            "m0": [task("forward", 0, (0, 2), (0.0, 1.0)), task("backward", 0, (0, 2), (5.0, 7.0))],
        }
    )
    spans = {(each.member, each.kind): each.span for each in apart(done)}
    assert spans == {
        ("m1", "forward"): (1.0, 3.0),
        ("m1", "backward"): (3.0, 5.0),
        ("m0", "forward"): (0.0, 1.0),
        ("m0", "backward"): (5.0, 7.0),
    }


def test_the_readme_has_the_planners_keys_and_their_reaches() -> None:
    rows = [line.split("|")[1:4] for line in README.read_text().splitlines() if line.startswith("| `")]
    told = {
        key: reach.strip()
        for keys, _, reaches in rows
        for key, reach in zip(re.findall(r"`(\w+)`", keys), reaches.split(","), strict=False)
    }
    assert {key: told.get(key) for key in planner.REACHES} == {
        key: str(reach) for key, reach in planner.REACHES.items()
    }


def test_the_plans_of_a_row_meet_the_same_and_the_planners_is_the_best_modelled() -> None:
    rows, free = planner.pairs(quick=True), planner.Costs()
    for name in ("slow m0", "slow m1", "slow m2", "slow m3", "split"):
        today, best = rows[name]
        assert (today.slow, today.plan.runs) == (best.slow, best.plan.runs)
        assert planner.modelled_s(best, free) < planner.modelled_s(today, free)
    re_routed, rule, planned = (planner.modelled_s(each, free, after=True) for each in rows["loss"])
    assert planned < rule < re_routed
    for case in rows["linear"]:
        assert case.after is not None and len(case.after.members) == case.count - 1


def test_the_plan_in_force_is_read_from_the_journal_with_its_splits() -> None:
    first = {"runs": 4, "blocks": {"m0": [0, 3], "m1": [3, 8]}, "limits": [2, 1]}
    later = {"runs": 4, "blocks": {"m0": [0, 4], "m1": [4, 8]}, "limits": [6, 5]}
    lines = [
        {"event": "plan", "step": 1, "pipelines": [first], "is_split": False},
        {"event": "plan", "step": 7, "pipelines": [later], "is_split": True},
    ]
    found = [plan_in_force(lines, step) for step in (6, 7)]
    cuts = [(each.pipelines[0].cuts, each.limits, bool(each.split)) for each in found]
    assert cuts == [((3,), {"m0": 2, "m1": 1}, False), ((4,), {"m0": 6, "m1": 5}, True)]
