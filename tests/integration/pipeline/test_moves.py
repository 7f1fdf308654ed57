"""Blocks that move while training goes on: shadows, kills in each part of a move, and the bits of a job of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.pipeline.test_pipelines import PIPELINED, assert_every_step_is_that_of_one, had, trained
from tests.support.training import Run, run_job

STEPS = ("--steps", "16", "--micro-batches", "4", "--backups", "2")
SLOW = "slow --target member:m1 --at step=1,phase=forward --factor 30 --how sleep"


def moves(run: Run) -> list[dict[str, Any]]:
    """Moves that have ended, once each."""
    found = {(e["named"], e["step"]): e for its in run.journals.values() for e in its if e["event"] == "moved"}
    return [found[key] for key in sorted(found)]


@pytest.mark.slow
def test_blocks_move_without_waiting(tmp_path: Path) -> None:
    run = trained(tmp_path, 3, 3, *STEPS, faults=(SLOW,))
    told = assert_every_step_is_that_of_one(run, *STEPS)
    assert len(had(told, 14)["m1"]) < len(had(told, 3)["m1"])
    ended = [each for each in moves(run) if not each["is_dropped"]]
    assert ended
    assert any(set(each["shadows"]) != {"m1"} for each in ended), "others take what it gives"


PARTS = [(part, member) for part in ("record", "publish", "ready", "over") for member in ("m0", "m1", "m2")]
USUAL = {("publish", "m1"), ("over", "m2")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "member"),
    [each if each in USUAL else pytest.param(*each, marks=pytest.mark.on_demand) for each in PARTS],
)
def test_a_loss_in_any_part_of_a_move_changes_no_bit(tmp_path: Path, part: str, member: str) -> None:
    kill = f"kill --target member:{member} --at phase=move-{part}"
    run = trained(tmp_path, 3, 3, *STEPS, faults=(SLOW, kill))
    assert_every_step_is_that_of_one(run, *STEPS)
    assert [(who, phase) for who, _, phase in run.phases_struck() if phase != "forward"] in (
        [(member, f"move-{part}")],
        [],  # a member that is no shadow is never ready
    )


@pytest.mark.slow
def test_what_is_coming_is_warmed_up_first(tmp_path: Path) -> None:
    run = trained(tmp_path, 3, 3, *STEPS, faults=(SLOW,))
    assert_every_step_is_that_of_one(run, *STEPS)
    warmed = [line for its in run.journals.values() for line in its if line["event"] == "warmed_up"]
    assert warmed
    assert all(problem == "" for line in warmed for problem in line["problems"].values())


@pytest.mark.slow
def test_standing_shadows_keep_what_only_one_member_computes(tmp_path: Path) -> None:
    kill = "kill --target member:m1 --at step=8,phase=forward"
    options = ("--stages", "3", "--standing-shadows")
    run = run_job(tmp_path, workers=3, arguments=STEPS, options=options, script=PIPELINED, faults=(kill,))
    assert_every_step_is_that_of_one(run, *STEPS)
    plans = [line for line in run.journals["m0"] if line["event"] == "plan" and line["step"] < 8]
    assert set(plans[-1]["standing"]) <= {"m0", "m1", "m2"}
    assert sum(len(blocks) for blocks in plans[-1]["standing"].values()) >= 3, "each block has one replica"
