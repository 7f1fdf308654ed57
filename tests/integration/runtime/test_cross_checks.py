"""Two workers that are not one end their job in step 0, in one sentence; those that are one never hear of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import SCRIPT, Run, assert_equal_to_undisturbed, run_job

pytestmark = pytest.mark.slow

CARRYING = SCRIPT.parent / "carrying_training.py"


def _sentences(run: Run) -> set[str]:
    return {line for line in run.output.splitlines() if "came out differently on" in line}


@pytest.mark.parametrize(("carries", "workers"), [("generator", 2), ("dataset", 2), ("loop", 2)])
def test_a_micro_batch_that_depends_on_what_came_before_ends_the_job_in_step_0(
    tmp_path: Path, carries: str, workers: int
) -> None:
    run = run_job(tmp_path, workers=workers, script=CARRYING, arguments=("--carries", carries))
    assert run.exit_code == 1, run.output
    assert any("of step 0 came out differently on m0 and m1" in sentence for sentence in _sentences(run)), run.output
    assert "random generator of one's own" in run.output
    assert not [e for events in run.journals.values() for e in events if e["event"] == "passed"], "nothing is committed"


def test_a_number_of_the_model_that_counts_micro_batches_ends_the_job_in_step_0_and_is_named(tmp_path: Path) -> None:
    run = run_job(tmp_path, workers=3, script=CARRYING, arguments=("--carries", "counter"))
    assert run.exit_code == 1, run.output
    assert "'calls' of the model counts micro-batches (0, 1, 2, 3)" in run.output
    assert not [e for events in run.journals.values() for e in events if e["event"] == "passed"], "nothing is committed"


def test_where_kernels_may_differ_it_is_a_warning_on_the_screen_once(tmp_path: Path) -> None:
    arguments = ("--carries", "member", "--deterministic", "0", "--every", "1", "--steps", "3")
    run = run_job(tmp_path, workers=2, script=CARRYING, arguments=arguments)
    assert run.exit_code == 0, run.output
    assert len(_sentences(run)) == 1
    assert len(set(run.digests.values())) == 1, "members agree to the bit"
    told = [
        (m, e["step"], e["reason"]) for m, events in run.journals.items() for e in events if e["event"] == "warning"
    ]
    assert {(m, step) for m, step, _ in told} == {(m, step) for m in ("m0", "m1") for step in range(3)}
    assert len({(step, reason) for _, step, reason in told}) == 3, "the record is the same on all"


def test_checks_in_every_step_change_no_bit_and_raise_no_alarm_under_losses_and_joins(tmp_path: Path) -> None:
    arguments = ("--every", "1", "--steps", "20", "--linger", "3")
    faults = ["kill --target member:m1 --at step=3,phase=backward", "kill --target member:m2 --at step=9,phase=commit"]
    run = run_job(tmp_path, workers=3, script=CARRYING, arguments=arguments, faults=faults)
    assert_equal_to_undisturbed(run, "--steps", "20", script=CARRYING)
    checked = {m: {e["step"] for e in events if e["event"] == "cross_check"} for m, events in run.journals.items()}
    assert checked["m0"] >= {0, 1, 2}
    assert checked["m3"] and checked["m4"], "those that came in their place were checked, too"
    assert not _sentences(run)


def test_members_check_each_other_in_the_first_step_only_unless_asked_to(tmp_path: Path) -> None:
    run = run_job(tmp_path, workers=2, script=CARRYING, arguments=("--steps", "4"))
    assert_equal_to_undisturbed(run, "--steps", "4", script=CARRYING)
    checks = [(m, e["step"]) for m, events in run.journals.items() for e in events if e["event"] == "cross_check"]
    assert sorted(checks) == [("m0", 0), ("m1", 0)]
