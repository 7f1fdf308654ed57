"""Devices that fail in real jobs: a member is lost, a device is left out, or the script is at fault; no bit changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import SCRIPTS, Run, assert_equal_to_undisturbed, run_job

pytestmark = pytest.mark.slow
SCRIPT = SCRIPTS / "device_training.py"
ARGUMENTS = ("--steps", "14", "--backups", "all")


def run(folder: Path, workers: int, faults: str, shared: str = "") -> Run:
    given = {"DEVICE_FAULTS": faults, "DEVICE_SHARED": shared}
    return run_job(folder, workers=workers, script=SCRIPT, arguments=ARGUMENTS, **given)


def test_members_whose_devices_fail_are_replaced_until_one_device_has_failed_twice(tmp_path: Path) -> None:
    done = run(tmp_path, 3, "m1@2 error,m0@4 oom,m3@9 error")
    assert_equal_to_undisturbed(done, *ARGUMENTS, script=SCRIPT)
    one = "Late Test Device (UUID late-1)"
    assert f"{one} has failed in m1: this process does not use it any more, and ends" in done.output
    assert "Late Test Device (UUID late-0) has no memory left for m0: of its limit of" in done.output
    failed = [(e["member"], e["device"]) for e in done.events if e["event"] == "failed"]
    assert failed[:2] == [("m1", one), ("m0", "Late Test Device (UUID late-0)")]


def test_the_same_error_at_the_same_place_on_two_devices_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, 3, "*@3 error")
    assert done.exit_code == 1
    assert "raised the same exception at step 3, micro-batch 4, on Late Test Device (UUID late-" in done.output
    assert "it is a fault in the script, not in a device" in done.output
    assert "AcceleratorError: LATE error: an illegal memory access was encountered" in done.output


def test_without_a_device_that_works_the_job_ends_and_names_both_causes(tmp_path: Path) -> None:
    done = run(tmp_path, 2, "m0@2 error,m1@4 error", shared="late-x")
    assert done.exit_code == 1
    assert "no device is left after failures of Late Test Device (UUID late-x)" in done.output
    assert "either the script makes it fail, or the device is broken" in done.output
