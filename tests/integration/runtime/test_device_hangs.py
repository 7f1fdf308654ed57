"""A member whose device never finishes its work is named and ended like one whose loop hangs; no bit differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.training import SCRIPTS, Run, assert_equal_to_undisturbed, run_job

pytestmark = pytest.mark.slow
SCRIPT = SCRIPTS / "device_hang_training.py"
DEVICE = "late:0 (Late Test Device, late-00000000)"


def hang(run: Run, member: str) -> dict[str, Any]:
    (event,) = [e for e in run.events if e["event"] == "hang"]
    (kill,) = [e for e in run.events if e["event"] == "kill" and "because it hangs" in e["reason"]]
    assert event["member"] == kill["member"] == member
    found: dict[str, Any] = event
    return found


def test_a_stream_that_never_ends_is_found_as_soon_as_a_loop_that_hangs(tmp_path: Path) -> None:
    steps = ("--steps", "10", "--step-s", "0.05")
    found = {}
    for how in ("--hangs", "--loops"):
        (folder := tmp_path / how).mkdir()
        run = run_job(
            folder, workers=3, arguments=(*steps, how, "m1:5"), script=SCRIPT, options=["--max-restarts", "0"]
        )
        assert_equal_to_undisturbed(run, *steps, "--device", "cpu", script=SCRIPT)
        found[how] = hang(run, "m1")
    assert found["--hangs"]["for_s"] <= found["--loops"]["for_s"] + 0.5
    assert found["--hangs"]["device"] == DEVICE and "device" not in found["--loops"]
    assert f"while its device {DEVICE} does not finish the work that was submitted" in found["--hangs"]["reason"]


def test_a_stream_of_the_engine_that_never_ends_is_found_too(tmp_path: Path) -> None:
    steps = ("--steps", "10", "--step-s", "0.05")
    run = run_job(tmp_path, workers=3, arguments=(*steps, "--hangs-at", "m1:5:1"), script=SCRIPT)
    assert_equal_to_undisturbed(run, *steps, "--device", "cpu", script=SCRIPT)
    assert DEVICE in hang(run, "m1")["reason"]
