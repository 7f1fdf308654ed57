"""The model behind `status`, `top` and the metrics: texts and rows made of the state that agents tell."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrain.launcher.watch import now as model
from elastrain.launcher.watch.words import duration, memory, size
from tests.support.watched import NOW, a_member, a_state


def test_shares_are_those_of_the_members_that_have_told() -> None:
    members = [a_member("m0", micro_batches=3.0), a_member("m1", micro_batches=1.0), a_member("m2")]
    state = a_state(members=members)
    assert model.shares(state) == {"m0": 0.75, "m1": 0.25}
    rows = model.member_rows(state)
    assert [row[6] for row in rows] == ["75 % (3)", "25 % (1)", "-"]
    assert all(len(row) == len(model.MEMBER_COLUMNS) for row in rows)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"parked": "half of the nodes are gone", "parked_s": 3.0}, "the view cannot change for 3.0 s: half of"),
        ({"store_away_s": 61.0}, "the store has not answered for 1 min 01 s; training goes on"),
        ({"members": [a_member("m2", rank=None, state="starting", replaces="m1")]}, "m2 starts in place of m1"),
        ({"members": [a_member("m2", rank=None, state="ready")]}, "m2 is ready and waits for a view"),
        ({"members": [a_member("m1", state="gone")]}, "m1 is gone, and the members agree on a view without it"),
        (
            {"window": {"shards": {"3": 1}, "since_step": 7, "since_s": 2.0}},
            "shards are copied to new holders: shard 3 held by 1 member only; since step 7, 2.0 s ago",
        ),
    ],
)
def test_each_recovery_has_a_sentence_with_its_reason(changed: dict[str, Any], sentence: str) -> None:
    assert model.recovering(a_state()) == []
    (found,) = model.recovering(a_state(**changed))
    assert found.startswith(sentence)


def test_people_see_pace_end_and_the_age_of_the_checkpoint() -> None:
    shown = dict(model.figures(a_state(), NOW + 2))
    assert shown["step"] == "41 of 100, loss 0.2500, steps lost 0"
    assert shown["pace"] == "30 steps per minute, 1 min 58 s to the end"
    assert shown["checkpoint"] == "step 40, 12.0 s ago"
    assert "pace" not in dict(model.figures(a_state(exit_code=0), NOW))


def test_ages_of_an_ended_runs_reasons_grow() -> None:
    (reason,) = model.reasons(a_state(reasons=["m1 lost"], reasons_ago_s=[5.0]), NOW + 60)
    assert (reason.text, reason.ago_s) == ("m1 lost", 65.0)


def test_programs_get_what_people_see() -> None:
    told = model.told(a_state(parked="why", parked_s=1.0, members=[a_member("m0", micro_batches=2.0)]), NOW)
    assert told["recovers"] and told["members"][0]["share"] == 1.0 and told["age_s"] == 0.0


@given(st.floats(0, 1e9))
def test_durations_and_sizes_are_short(value: float) -> None:
    assert len(duration(value)) <= 12 and len(size(value * 1e4)) <= 8


def test_units_change_where_people_expect_it() -> None:
    assert [duration(s) for s in (None, 0.031, 9.1, 127, 3900, 90000)] == [
        *("-", "31 ms", "9.1 s", "2 min 07 s", "1 h 05 min", "1 d 01 h")
    ]
    assert [size(b) for b in (None, 12, 1500, 174542848)] == ["-", "12 B", "1.5 kB", "175 MB"]
    assert memory(50_000_000, 100_000_000) == "50 % of 100 MB"
    assert (memory(None, None), memory(None, 1000), memory(1000, None)) == ("-", "- of 1 kB", "1 kB")
