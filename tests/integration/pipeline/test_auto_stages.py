"""`--stages auto` in real jobs: as few members per pipeline as have room, and bits that do not depend on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastrain.memory.plan_check import UNSEEN_BYTES
from tests.integration.pipeline.test_memory_limit import SCRIPT, events, limited
from tests.support.training import SCRIPTS, Run, assert_equal_to_undisturbed, run_job

ARGUMENTS = ("--steps", "3", "--width", "2048", "--micro-batch-size", "9")

pytestmark = pytest.mark.slow


def lengths(run: Run) -> list[int]:
    """Return the members of each pipeline of the first plan."""
    first: dict[str, Any] = min(events(run, "plan"), key=lambda each: each["t"])
    return [len(each["blocks"]) for each in first["pipelines"]]


def auto(folder: Path, limit_bytes: int, **how: Any) -> Run:
    return limited(folder, None, limit_bytes, 4, "auto", arguments=ARGUMENTS, **how)


def test_as_many_members_share_a_pipeline_as_have_no_room_for_more_blocks(tmp_path: Path) -> None:
    ample = auto(tmp_path / "ample", 64 << 30)
    assert lengths(ample) == [1, 1, 1, 1]
    assert_equal_to_undisturbed(ample, *ARGUMENTS, script=SCRIPT)
    # The first step takes most: each member has the whole model, and the gradients of all blocks.
    parts = ("base", "parameters", "gradients", "shards", "activations", "boundaries")
    needed_bytes = max(
        sum(e[f"need_{part}_bytes"] for part in parts) for e in events(ample, "room") if not e["need_is_measured"]
    )
    tight = auto(tmp_path / "tight", needed_bytes + UNSEEN_BYTES - (4 << 20))
    assert min(lengths(tight)) > 1
    assert_equal_to_undisturbed(tight, *ARGUMENTS, script=SCRIPT)


def test_after_a_loss_no_pipeline_gets_shorter_than_what_has_room(tmp_path: Path) -> None:
    faults = ["kill --target member:m1 --at step=1,phase=backward"]
    run = run_job(
        tmp_path,
        script=SCRIPT,
        options=("--stages", "auto", "--max-restarts", "0"),
        workers=3,
        arguments=ARGUMENTS,
        faults=faults,
    )
    assert lengths(run) == [1, 1, 1]
    assert_equal_to_undisturbed(run, *ARGUMENTS, script=SCRIPT)


def test_a_model_without_a_legal_cut_is_computed_whole_by_every_member_and_one_sentence_says_so(tmp_path: Path) -> None:
    run = run_job(tmp_path, script=SCRIPTS / "uncut_training.py", options=("--stages", "auto"), workers=2, arguments=())
    assert run.exit_code == 0
    assert (
        run.output.count("--stages auto: no cut of this model is legal, so every member computes the whole model") == 1
    )
    assert lengths(run) == [1, 1]
    assert_equal_to_undisturbed(run, script=SCRIPTS / "uncut_training.py")
