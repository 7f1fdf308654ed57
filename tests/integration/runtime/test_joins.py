"""Members that come while the job trains, in an order that the protocol has to sort out."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastrain.runtime.engine.pacing import RECOVERY_DEADLINE_S
from tests.support.training import SCRIPT, Run, assert_equal_to_undisturbed, run_job

pytestmark = pytest.mark.slow

TWO_NEWCOMERS = SCRIPT.parent / "two_newcomers.py"


def test_two_workers_that_come_back_within_one_step_train_with_the_others_at_once(tmp_path: Path) -> None:
    """The first one begins in a view that nobody else takes over, and must hear that the others are in the next one."""
    _assert_both_came_and_nobody_was_suspected(run_job(tmp_path, workers=3, arguments=(), script=TWO_NEWCOMERS))


def test_newcomers_wait_for_the_end_of_a_step_however_long_it_takes(tmp_path: Path) -> None:
    arguments = ("--longer-s", str(1.5 * RECOVERY_DEADLINE_S))
    _assert_both_came_and_nobody_was_suspected(run_job(tmp_path, workers=3, arguments=arguments, script=TWO_NEWCOMERS))


def _assert_both_came_and_nobody_was_suspected(run: Run) -> None:
    assert_equal_to_undisturbed(run, script=TWO_NEWCOMERS)
    stuck = [e for e in run.events if e["event"] == "suspect" and "no report" in e["reason"]]
    assert not stuck, f"they waited for one another: {stuck}"
    assert set(run.digests) == {"m0", "m3", "m4"}, run.output
