"""Hand-outs: every run to exactly one member, as evenly as may be, and nothing that is under way is moved."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastrain.job.run_plan import assign, level, plan

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
def test_with_quotas_each_run_goes_to_exactly_one_and_nobody_could_have_done_less(
    members: list[str], runs: int, data: st.DataObject
) -> None:
    quotas = {member: data.draw(st.integers(1, 4)) for member in members}
    handed = plan(members, runs, quotas)
    assert [run for member in members for run in handed[member]] == list(range(runs))
    cost = {member: len(handed[member]) / quotas[member] for member in members}
    slowest = max(cost.values())
    assert all((len(handed[member]) + 1) / quotas[member] >= slowest - 1e-9 for member in members)
    levelled = level(handed, dict.fromkeys(members, 0), quotas)
    assert level(levelled, dict.fromkeys(members, 0), quotas) == levelled
    assert max(len(levelled[member]) / quotas[member] for member in members) <= slowest
