"""Devices that fail in real jobs: a member is lost, a device is left out, or the script is at fault; no bit changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastrain.launcher.shared.rundir import RunDir
from tests.support.training import SCRIPTS, Run, assert_equal_to_undisturbed, run_job

pytestmark = pytest.mark.slow
SCRIPT = SCRIPTS / "device_training.py"
ARGUMENTS = ("--steps", "14", "--backups", "all")


def run(folder: Path, faults: str, *, shared: str = "", slow_until: str | None = None) -> Run:
    given = {"DEVICE_FAULTS": faults, "DEVICE_SHARED": shared}
    return run_job(folder, workers=2, script=SCRIPT, arguments=ARGUMENTS, slow_until=slow_until, **given)


def test_a_member_is_replaced_until_its_device_has_failed_twice_and_the_bits_are_the_cpus(tmp_path: Path) -> None:
    done = run(tmp_path, "m1@2 oom,m2@any error", slow_until="m2")
    assert_equal_to_undisturbed(done, *ARGUMENTS, script=SCRIPT)
    device = "Late Test Device (UUID late-1)"
    assert f"{device} has no memory left for m1: it has 16384 MiB, of which this process's tensors hold" in done.output
    assert f"{device} has failed in m2: this process does not use it any more, and ends" in done.output
    assert "for the second time: no worker is started on it any more" in done.output
    assert [(e["member"], e["device"]) for e in done.events if e["event"] == "failed"] == [
        ("m1", device),
        ("m2", device),
    ]
    assert {e["member"] for e in done.events if e["event"] == "worker_start"} == {"m0", "m1", "m2"}
    assert RunDir(path=done.folder).read_state()["devices"] == [{"device": device, "failures": 2, "left_out": True}]


def test_the_same_error_at_the_same_place_on_two_devices_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "*@3 error")
    assert done.exit_code == 1
    assert "raised the same exception at step 3, micro-batch 4, on Late Test Device (UUID late-" in done.output
    assert "it is a fault in the script, not in a device" in done.output
    assert "AcceleratorError: LATE error: an illegal memory access was encountered" in done.output


def test_without_a_device_that_works_the_job_ends_and_names_both_causes(tmp_path: Path) -> None:
    done = run(tmp_path, "m0@2 error,m1@4 error", shared="late-x")
    assert done.exit_code == 1
    assert "no device is left after failures of Late Test Device (UUID late-x)" in done.output
    assert "either the script makes it fail, or the device is broken" in done.output


def test_a_script_that_makes_the_device_torchs_default_loses_a_member_and_no_bit(tmp_path: Path) -> None:
    given = {"DEVICE_FAULTS": "m1@3 error", "DEVICE_DEFAULT": "1"}
    arguments = (*ARGUMENTS, "--loaders", "1")
    done = run_job(tmp_path, workers=2, script=SCRIPT, arguments=arguments, slow_until="m2", **given)
    assert_equal_to_undisturbed(done, *arguments, script=SCRIPT)
    assert "m1" not in done.digests


def test_a_loop_whose_activations_lie_on_a_drive_loses_a_member_and_no_bit(tmp_path: Path) -> None:
    (drive := tmp_path / "drive").mkdir()
    given, arguments = {"DEVICE_FAULTS": ""}, (*ARGUMENTS, "--saved-in", str(drive))
    killed = "kill --target member:m1 --at step=3,phase=backward"
    done = run_job(tmp_path, workers=2, script=SCRIPT, arguments=arguments, faults=[killed], slow_until="m2", **given)
    assert_equal_to_undisturbed(done, *ARGUMENTS, script=SCRIPT)
    assert "m1" not in done.digests
    assert done.output.count("spilled") == len(done.digests)
    assert "spilled 0" not in done.output
    assert list(drive.iterdir()) == []
    told = [e for events in done.journals.values() for e in events if e["event"] == "activations_moved"]
    assert [(e["to"], e["by"]) for e in told] == [(str(drive), "our own pinned copies")] * len(done.digests)
