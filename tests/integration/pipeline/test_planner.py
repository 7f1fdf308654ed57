"""A job that measures its members: a slow one gets fewer blocks, and the bits stay those of one worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.pipeline.test_pipelines import PIPELINED, assert_every_step_is_that_of_one, had, trained
from tests.support.training import Run, run_job

STEPS = ("--steps", "16", "--micro-batches", "4")
MORE_STEPS = ("--steps", "24", "--micro-batches", "6")
SLOW = "slow --target member:m1 --at step=1,phase=forward --factor 30 --how sleep"


def planned(run: Run) -> dict[str, list[bool]]:
    """Member -> for each answer of its planner, whether it was another plan than the one in force."""
    found = {m: [e["is_new"] for e in its if e["event"] == "planned"] for m, its in run.journals.items()}
    return {member: answers for member, answers in found.items() if answers}


@pytest.mark.slow
def test_a_slow_member_gets_fewer_blocks(tmp_path: Path) -> None:
    run = trained(tmp_path, 3, 3, *STEPS, faults=(SLOW,))
    told = assert_every_step_is_that_of_one(run, *STEPS)
    answers = planned(run)
    assert set(answers) == {"m0"}, "the view's first member alone asks"
    assert True in answers["m0"]
    assert len(had(told, 14)["m1"]) < len(had(told, 3)["m1"])


@pytest.mark.slow
def test_the_first_member_may_be_lost_while_its_planner_computes(tmp_path: Path) -> None:
    # Five steps are measured, so the question comes when step 5 is committed, or in its vote.
    kill = "kill --target member:m0 --at step=6,phase=forward"
    run = trained(tmp_path, 3, 3, *STEPS, faults=(SLOW, kill))
    assert_every_step_is_that_of_one(run, *STEPS)
    # By then the planner may have put another member first.
    assert planned(run).keys() - {"m0"}, "the next first member goes on"


@pytest.mark.slow
def test_after_a_loss_the_planner_is_asked_at_once_about_those_that_are_left(tmp_path: Path) -> None:
    kill = "kill --target member:m1 --at step=12,phase=forward"
    # No newcomer: while it gets its blocks, no plan is sought.
    options = ("--stages", "2", "--max-restarts", "0")
    run = run_job(tmp_path, workers=4, arguments=MORE_STEPS, options=options, script=PIPELINED, faults=(kill,))
    assert_every_step_is_that_of_one(run, *MORE_STEPS)
    its = run.journals["m0"]
    asked = next(n for n, e in enumerate(its) if e["event"] == "planner_asked" and e["generation"] == 2)
    # Not only once the members that are left have been measured anew, which takes five steps.
    assert asked < next(n for n, e in enumerate(its) if e["event"] == "passed" and e["step"] == 16)
