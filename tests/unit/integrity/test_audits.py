"""Who audits what, and who was wrong: decided by all members alike."""

from __future__ import annotations

from dataclasses import replace

from elastrain.integrity.audits import audits_of, duties, judge
from elastrain.job.values import AuditPlan, Check

MEMBERS = ("a", "b", "c", "d")
ALL = AuditPlan(every=1, is_of_all=True, seed=3)
RIGHT = Check(micro_batch=4, loss=0.5, weight=2.0, digests=(1, 2))
WRONG, THIRD = replace(RIGHT, digests=(1, 9)), replace(RIGHT, digests=(8, 2))


def told(**checks: Check) -> dict[str, tuple[Check, ...]]:
    return {member: (check,) for member, check in checks.items()}


def test_without_audits_or_alone_nothing_is_audited() -> None:
    assert audits_of(AuditPlan(), 0, 8, MEMBERS).runs == ()
    assert audits_of(ALL, 0, 8, ("a",)).runs == ()


def test_one_run_in_every_so_many_steps_which_varies() -> None:
    plan = AuditPlan(every=5, seed=1)
    chosen = [audits_of(plan, step, 8, MEMBERS).runs for step in range(200)]
    assert all(bool(runs) == (step % 5 == 0) for step, runs in enumerate(chosen))
    assert {run for runs in chosen for run in runs} == set(range(8))


def test_nobody_audits_itself_and_with_all_every_run_has_one_auditor_or_two_where_the_step_began_anew() -> None:
    for step in range(20):
        for is_anew, count in ((False, 1), (True, 2)):
            audits = audits_of(ALL, step, 8, MEMBERS, is_anew=is_anew)
            assert audits.runs == tuple(range(8))
            for owner in MEMBERS:
                found = audits.auditors_of(owner, MEMBERS)
                assert len(set(found)) == count
                assert owner not in found
    assert len({audits_of(ALL, step, 8, MEMBERS).auditors_of("a", MEMBERS) for step in range(20)}) == 3


def test_a_loss_moves_the_audits_of_the_lost_member_alone() -> None:
    audits = audits_of(ALL, 0, 8, MEMBERS)
    before = {owner: audits.auditors_of(owner, MEMBERS) for owner in ("a", "b", "c")}
    after = {owner: audits.auditors_of(owner, ("a", "b", "c")) for owner in ("a", "b", "c")}
    assert all(after[owner] == before[owner] or before[owner] == ("d",) for owner in after)
    assert all("d" not in members for members in after.values())


def test_what_is_loaded_ahead_is_what_will_be_audited() -> None:
    runs = {"a": (0, 1), "b": (2,), "c": (3,)}
    found = {member: duties(ALL, 7, runs, member) for member in runs}
    assert sorted(run for mine in found.values() for run in mine) == [0, 1, 2, 3]
    assert all(run not in runs[member] for member, mine in found.items() for run in mine)


def test_equal_results_accuse_nobody_and_a_nan_equals_a_nan() -> None:
    nan = replace(RIGHT, loss=float("nan"))
    assert judge(3, told(a=RIGHT, b=RIGHT), {}).disputed == ()
    assert judge(3, told(a=nan, b=replace(nan, loss=float("nan"))), {}).disputed == ()


def test_of_two_nobody_is_accused_and_both_compute_again() -> None:
    found = judge(3, told(a=RIGHT, b=WRONG), {})
    assert (found.disputed, found.wrong, found.is_hopeless) == ((4,), (), False)


def test_two_of_three_are_right() -> None:
    found = judge(3, told(a=RIGHT, b=WRONG, c=RIGHT), {})
    assert found.wrong == (("b", "micro-batch 4 of step 3 came out wrong on b: a and c agree"),)
    assert found.disputed == (4,)


def test_who_was_wrong_before_is_shown_by_what_all_have_now() -> None:
    found = judge(3, told(a=RIGHT, b=RIGHT), told(a=RIGHT, b=WRONG))
    assert [member for member, _ in found.wrong] == ["b"]
    assert found.disputed == ()


def test_who_is_wrong_in_both_attempts_is_accused_twice() -> None:
    found = judge(3, told(a=RIGHT, b=WRONG, c=RIGHT), told(a=RIGHT, b=WRONG))
    assert [member for member, _ in found.wrong] == ["b", "b"]


def test_of_two_who_still_differ_the_one_that_has_changed_was_wrong() -> None:
    found = judge(3, told(a=RIGHT, b=THIRD), told(a=RIGHT, b=WRONG))
    assert [member for member, _ in found.wrong] == ["b"]
    assert not found.is_hopeless


def test_where_both_have_changed_or_none_nobody_can_tell() -> None:
    assert judge(3, told(a=RIGHT, b=WRONG), told(a=RIGHT, b=WRONG)).is_hopeless
    assert judge(3, told(a=RIGHT, b=WRONG), told(a=WRONG, b=THIRD)).is_hopeless


def test_many_micro_batches_of_one_attempt_are_one_fault() -> None:
    later = [replace(check, micro_batch=5) for check in (RIGHT, WRONG)]
    found = judge(3, {"a": (RIGHT, later[0]), "b": (WRONG, later[1]), "c": (RIGHT, later[0])}, {})
    assert [member for member, _ in found.wrong] == ["b"]
    assert found.disputed == (4, 5)
