"""What is computed after its step has ended, and sums that cover what others had: no bit changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import SCRIPT, assert_equal_to_undisturbed, run_job

pytestmark = pytest.mark.slow
LATE, LOSSES = SCRIPT.parent / "late_backward.py", SCRIPT.parent / "two_losses.py"


@pytest.mark.parametrize("arguments", [("--victim", "m0"), ("--victim", "m1"), ("--victim", "m1", "--stem")])
def test_a_step_that_commits_within_a_backward_of_a_run_computed_again(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    run = run_job(tmp_path, workers=3, script=LATE, arguments=arguments, options=["--max-restarts", "0"])
    assert_equal_to_undisturbed(run, *arguments, script=LATE)
    assert {"m0", "m1", "m2"} - set(run.digests) == {arguments[1]}


def test_the_survivor_of_two_losses_in_one_step_counts_every_run_once(tmp_path: Path) -> None:
    run = run_job(tmp_path, workers=3, script=LOSSES, arguments=(), options=["--max-restarts", "0"])
    assert_equal_to_undisturbed(run, script=LOSSES)
    assert set(run.digests) == {"m2"}
