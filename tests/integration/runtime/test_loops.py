"""Other people's loops on real workers, one of which is killed and comes back: the bits are those of a job of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import SCRIPT, Run, assert_equal_to_undisturbed, run_job, undisturbed

pytestmark = pytest.mark.slow

FINETUNING = SCRIPT.parent / "finetuning.py"
LOOPS = SCRIPT.parent / "loop_training.py"


def _assert_one_was_killed_and_another_took_part(run: Run, phase: str) -> None:
    assert [struck for _, _, struck in run.phases_struck()] == [phase]
    assert set(run.digests) == {"m0", "m2", "m3"}
    assert any(e["event"] == "passed" for e in run.journals["m3"]), "a newcomer takes part"


@pytest.mark.parametrize(("model", "phase"), [("ends", "backward"), ("adapters", "publish")])
def test_fine_tuning_survives_a_kill_bit_for_bit(tmp_path: Path, model: str, phase: str) -> None:
    arguments = ("--steps", "20", "--model", model)
    faults = [f"kill --target member:m1 --at step=6,phase={phase}"]
    run = run_job(tmp_path, workers=3, script=FINETUNING, arguments=(*arguments, "--linger", "3"), faults=faults)
    assert_equal_to_undisturbed(run, *arguments, script=FINETUNING)
    _assert_one_was_killed_and_another_took_part(run, phase)


def _besides(run: Run) -> set[str]:
    return {line.partition("besides")[2] for line in run.output.splitlines() if "besides the model:" in line}


def test_what_a_loop_draws_changes_and_averages_is_that_of_a_job_of_one_also_on_a_newcomer(tmp_path: Path) -> None:
    arguments = ("--steps", "20")
    faults = ["kill --target member:m1 --at step=6,phase=backward"]
    run = run_job(tmp_path, workers=3, script=LOOPS, arguments=(*arguments, "--linger", "3"), faults=faults)
    assert_equal_to_undisturbed(run, *arguments, script=LOOPS)
    _assert_one_was_killed_and_another_took_part(run, "backward")
    assert _besides(run) == _besides(undisturbed(*arguments, script=LOOPS)) != set()


def test_members_whose_averages_differ_are_told_by_name(tmp_path: Path) -> None:
    odd = tmp_path / "odd.py"
    wrong = "mine.data.mul_(0.9 if __import__('os').environ['ELASTRAIN_MEMBER'] == 'm0' else 0.8)"
    odd.write_text(LOOPS.read_text().replace("mine.data.mul_(0.9)", wrong))
    run = run_job(tmp_path, workers=2, script=odd, arguments=("--steps", "10"))
    assert run.exit_code == 1
    assert "with different teacher" in run.output
