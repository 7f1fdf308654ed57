"""Drives that fail under a real job: activations are computed again, a member without its state is left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.training import Run, assert_equal_to_undisturbed, run_job

SCRIPT = Path(__file__).parent / "scripts" / "drive_training.py"
STEPS = ("--steps", "4")

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == [], "something was left behind"


def on_drives(folder: Path, disk: Path, arguments: tuple[str, ...], **how: Any) -> Run:
    options = ["--memory-limit", "64G", "--offload-dir", str(disk), "--max-restarts", "0"]
    return run_job(folder, script=SCRIPT, arguments=(*STEPS, *arguments), options=options, **how)


def test_a_micro_batch_whose_activations_do_not_come_back_is_computed_again(tmp_path: Path, disk: Path) -> None:
    run = on_drives(tmp_path, disk, ("--activation-faults", "20:flip", "60:eio"), workers=2)
    assert_equal_to_undisturbed(run, *STEPS, script=SCRIPT)
    assert set(run.digests) == {"m0", "m1"}
    again = [event for events in run.journals.values() for event in events if event["event"] == "computed_again"]
    assert [event["member"] for event in again] == ["m1", "m1"]
    assert "other bytes than were written" in again[0]["reason"]
    assert "injected fault" in again[1]["reason"]


def test_a_member_whose_optimizer_state_does_not_come_back_ends_and_the_others_go_on(
    tmp_path: Path, disk: Path
) -> None:
    run = on_drives(tmp_path, disk, ("--shards", "--shard-faults", "12:eio"), workers=3)
    assert_equal_to_undisturbed(run, *STEPS, script=SCRIPT)
    assert set(run.digests) == {"m0", "m2"}
    assert "does not give back the optimizer state of shard" in run.output
    assert "Traceback" not in run.output


def test_a_member_killed_with_its_shards_on_disk_leaves_nothing_there(tmp_path: Path, disk: Path) -> None:
    kill = ["kill --target member:m0 --at step=2,phase=apply"]
    run = on_drives(tmp_path, disk, ("--shards",), workers=2, faults=kill)
    assert_equal_to_undisturbed(run, *STEPS, script=SCRIPT)
    assert set(run.digests) == {"m1"}
    rooms = [event for event in run.journals["m0"] if event["event"] == "room"]
    assert min(event["shards_on_disk"] for event in rooms) > 0
