"""Hand-outs: every run to exactly one member, as evenly as may be, and nothing that is under way is moved."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from elastrain.job.run_plan import assign, level, plan, shares_by_speed

names_st = st.lists(st.sampled_from([f"m{i}" for i in range(9)]), min_size=1, unique=True)


@given(members=names_st, runs=st.integers(1, 64))
def test_a_fresh_plan_hands_each_run_to_exactly_one_in_near_equal_slices(members: list[str], runs: int) -> None:
    handed = plan(members, runs)
    assert [run for member in members for run in handed[member]] == list(range(runs))
    lengths = [len(handed[member]) for member in members]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(members=names_st, missing=st.sets(st.integers(0, 63)), data=st.data())
def test_missing_runs_go_to_those_who_have_least_to_do(
    members: list[str], missing: set[int], data: st.DataObject
) -> None:
    loads = {member: data.draw(st.integers(0, 9)) for member in members}
    runs = sorted(missing)
    handed = assign(runs, loads)
    assert [run for member in members for run in handed[member]] == runs
    totals = {member: loads[member] + len(handed[member]) for member in members}
    for member in members:
        if handed[member]:
            assert all(totals[member] - 1 <= total for total in totals.values())


@given(members=names_st, data=st.data())
def test_levelling_moves_only_what_is_not_under_way_and_evens_out(members: list[str], data: st.DataObject) -> None:
    runs: dict[str, tuple[int, ...]] = {}
    next_run = 0
    for member in members:
        count = data.draw(st.integers(0, 12))
        runs[member] = tuple(range(next_run, next_run + count))
        next_run += count
    fixed = {member: data.draw(st.integers(0, len(runs[member]))) for member in members}
    levelled = level(runs, fixed)
    assert sorted(run for todo in levelled.values() for run in todo) == list(range(next_run))
    shortest = min(len(todo) for todo in levelled.values())
    for member in members:
        assert levelled[member][: fixed[member]] == runs[member][: fixed[member]]
        assert len(levelled[member]) <= max(shortest + 1, fixed[member])
    assert level(levelled, fixed) == levelled


@given(members=names_st, runs=st.integers(1, 64), data=st.data())
def test_each_run_goes_to_exactly_one_by_speed_and_the_last_is_done_as_early_as_can_be(
    members: list[str], runs: int, data: st.DataObject
) -> None:
    speeds = {member: data.draw(st.integers(1, 400)) for member in members}
    handed = plan(members, runs, speeds)
    assert [run for member in members for run in handed[member]] == list(range(runs))
    slowest = max(len(handed[member]) / speeds[member] for member in members)
    # Whoever took one run more would be done no earlier than the slowest is now: for equal runs that is the optimum.
    assert all((len(handed[member]) + 1) / speeds[member] >= slowest for member in members)
    levelled = level(handed, dict.fromkeys(members, 0), speeds)
    assert level(levelled, dict.fromkeys(members, 0), speeds) == levelled
    assert max(len(levelled[member]) / speeds[member] for member in members) <= slowest


@given(
    speeds=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    loads=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    count=st.integers(0, 7),
)
def test_no_other_shares_are_done_earlier(speeds: list[int], loads: list[int], count: int) -> None:
    def takes(shares: Iterable[int]) -> float:
        return max((share and load + share) / speed for share, load, speed in zip(shares, loads, speeds, strict=False))

    found = shares_by_speed(count, speeds, loads[: len(speeds)])
    assert sum(found) == count
    others = (each for each in product(range(count + 1), repeat=len(speeds)) if sum(each) == count)
    assert takes(found) == min(map(takes, others))
