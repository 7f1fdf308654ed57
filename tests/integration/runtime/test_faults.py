"""Faults of every class that a worker survives, in real jobs: they strike, and the bits are the undisturbed job's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.training import PRECISION, SCRIPTS, Run, assert_equal_to_undisturbed, run_job

pytestmark = pytest.mark.slow

DRIVES = SCRIPTS / "drive_training.py"


def struck(run: Run) -> set[tuple[str, str]]:
    """(member, class) of all faults that struck from inside; none was refused."""
    events = [e for journal in run.journals.values() for e in journal] + run.events
    assert [e for e in events if e["event"] == "fault_refused"] == []
    return {(e["member"], e["kind"]) for e in events if e["event"] == "fault" and "kind" in e}


def test_members_that_raise_or_crash_are_lost_one_after_the_other(tmp_path: Path) -> None:
    arguments = ("--steps", "18", "--backups", "all")
    faults = [
        "slow --target member:m0 --at step=2 --for 0.5",
        "stop --target member:m0 --at step=3,phase=commit --for 0.2",
        "exception --target member:m1 --at step=5,phase=forward",
        "device-error --target member:m2 --at step=9,phase=forward --after 5",
        "segfault --target member:m3 --at step=13,phase=apply",
    ]
    run = run_job(tmp_path, workers=4, arguments=arguments, faults=faults)
    assert_equal_to_undisturbed(run, *arguments)
    m0 = {("m0", "slow"), ("m0", "stop")}
    assert struck(run) == m0 | {("m1", "exception"), ("m2", "device-error"), ("m3", "segfault")}
    assert "RuntimeError: an injected fault" in run.output
    assert "device error" in run.output
    assert [e["exit_code"] for e in run.events if e["event"] == "exit" and e["member"] == "m3"] == [-11]


def test_a_member_without_memory_and_one_that_aborts_are_lost(tmp_path: Path) -> None:
    arguments = ("--steps", "18", "--backups", "all")
    faults = [
        "memory-limit --target member:m1 --at step=4,phase=backward",
        "abort --target member:m2 --at step=8,phase=reduce",
    ]
    kinds = {("m1", "memory-limit"), ("m2", "abort")}
    exits = {"m1": 1, "m2": -6}
    if os.access("/sys/fs/cgroup/memory/cgroup.procs", os.W_OK):
        faults.append("out-of-memory --target member:m3 --at step=12,phase=forward")
        kinds, exits = kinds | {("m3", "out-of-memory")}, exits | {"m3": -9}
    run = run_job(tmp_path, workers=4, arguments=arguments, faults=faults)
    assert_equal_to_undisturbed(run, *arguments)
    assert struck(run) == kinds
    ended = {e["member"]: e["exit_code"] for e in run.events if e["event"] == "exit"}
    assert ended.items() >= exits.items()


def test_a_replacement_that_does_not_fit_is_refused_with_a_sentence_and_the_job_goes_on(tmp_path: Path) -> None:
    arguments = ("--steps", "18", "--backups", "all")
    faults = [
        "wrong-replacement --target member:m1 --at step=2,phase=backward --what config",
        "wrong-replacement --target member:m2 --at step=2,phase=backward --what secret",
    ]
    run = run_job(tmp_path, workers=3, arguments=arguments, faults=faults, slow_until="m5")
    assert_equal_to_undisturbed(run, *arguments)
    refused = [e["reason"] for e in run.events if e["event"] == "refused"]
    assert refused == ["its seed is 8, the job's is 7: start every worker with the same seed"]
    assert [e for e in run.events if e["event"] == "connection_refused" and "secret" in e["reason"]]
    assert "m5" in run.digests  # of a worker with the right secret, after the one with a wrong one


@pytest.mark.on_demand
@pytest.mark.parametrize("phase", ["quiesce", "report", "decide", "complete", "publish", "copy"])
def test_a_second_member_is_lost_in_each_phase_of_the_first_ones_recovery(tmp_path: Path, phase: str) -> None:
    arguments = ("--steps", "30", "--backups", "2")
    faults = ["kill --target member:m1 --at step=6,phase=backward", f"kill --target member:m2 --at phase={phase}"]
    if phase == "publish":  # of every step, too
        faults[1] = "kill --target member:m2 --at step=6,phase=publish"
    run = run_job(tmp_path, workers=4, arguments=arguments, faults=faults)
    assert_equal_to_undisturbed(run, *arguments)
    assert struck(run) == {("m1", "kill"), ("m2", "kill")}


def test_drives_that_fail_cost_work_and_no_bit(tmp_path: Path) -> None:
    steps = ("--steps", "6")
    (tmp_path / "disk").mkdir()
    options = ["--memory-limit", "64G", "--offload-dir", str(tmp_path / "disk"), "--max-restarts", "0"]
    faults = [
        "flip --target member:m1 --at step=1 --where spill",
        "drive --target member:m0 --at step=2 --how full --for 0.2",
        "drive --target member:m1 --at step=3 --how slow --rate 30 --for 0.2",
    ]
    run = run_job(tmp_path, workers=2, arguments=steps, faults=faults, options=options, script=DRIVES)
    assert_equal_to_undisturbed(run, *steps, script=DRIVES)
    assert struck(run) == {("m1", "flip"), ("m0", "drive"), ("m1", "drive")}
    again = [e["reason"] for e in run.journals["m1"] if e["event"] == "computed_again"]
    assert len(again) == 1
    assert "other bytes than were written" in again[0]


def test_a_member_whose_drives_fail_for_good_is_lost_with_a_sentence_and_no_bit(tmp_path: Path) -> None:
    steps = ("--steps", "6")
    (tmp_path / "disk").mkdir()
    options = ["--memory-limit", "64G", "--offload-dir", str(tmp_path / "disk"), "--max-restarts", "0"]
    faults = ["drive --target member:m1 --at step=2 --how failing"]
    run = run_job(tmp_path, workers=2, arguments=steps, faults=faults, options=options, script=DRIVES)
    assert_equal_to_undisturbed(run, *steps, script=DRIVES)
    assert struck(run) == {("m1", "drive")}
    assert set(run.digests) == {"m0"}
    assert "Input/output error (injected)" in run.output
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_flipped_master_of_half_precision_parameters_is_put_right(tmp_path: Path) -> None:
    arguments = ("--steps", "14", "--precision", "mixed")
    faults = ["flip --target member:m1 --at step=5 --where masters --bit 5"]
    run = run_job(tmp_path, workers=3, script=PRECISION, arguments=arguments, faults=faults)
    assert struck(run) == {("m1", "flip")}
    assert_equal_to_undisturbed(run, *arguments, script=PRECISION)
    assert "differs between its primary m1 and its backup" in run.output
    assert "m1 has made the update again" in run.output


def test_bits_of_every_kind_are_put_right_and_who_was_at_fault_twice_is_replaced(tmp_path: Path) -> None:
    """One member after the other; m0 has two faults of its own, and ends after the commit that follows the second."""
    arguments = ("--steps", "32", "--backups", "1")
    faults = [
        "flip --target member:m0 --at step=4 --where moments",
        "flip --target member:m1 --at step=10 --where partial",
        # A backup surely has one then: it keeps it from before its vote until its update is verified.
        "flip --target member:m2 --at step=16,phase=apply --where gradient",
        "flip --target member:m3 --at step=22 --where taken",
        "flip --target member:m0 --at step=28 --where parameters",
    ]
    run = run_job(tmp_path, workers=4, arguments=arguments, faults=faults)
    assert_equal_to_undisturbed(run, *arguments)
    assert struck(run) == {(f"m{n}", "flip") for n in range(4)}
    assert "it is fault 2 of m0, whose machine should be looked at" in run.output
    assert run.output.count("the open step begins anew") >= 5


def test_a_flipped_state_that_nobody_else_has_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    arguments = ("--steps", "18", "--backups", "1")
    faults = ["kill --target member:m1 --at step=5", "flip --target member:m0 --at step=12 --where moments"]
    run = run_job(tmp_path, workers=2, arguments=arguments, faults=faults, options=("--max-restarts", "0"))
    assert run.exit_code == 1
    assert struck(run) == {("m1", "kill"), ("m0", "flip")}
    assert "has changed in its memory since it was told" in run.output
    assert "all holders of shard 0 are gone (m0)" in run.output
