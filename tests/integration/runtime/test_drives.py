"""Drives that go wrong under real jobs, in every way: computed again, or a loss like any other; never other bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from elastrain.offload.planning import profile
from tests.support.training import SCRIPTS, Run, assert_equal_to_undisturbed, run_job

SCRIPT = SCRIPTS / "drive_training.py"
STEPS = ("--steps", "4", "--micro-batches", "4", "--run-length", "1")
"""Of the jobs of two: two micro-batches for each in each step, and one more step than faults strike in."""

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == [], "something was left behind"


def on_drives(folder: Path, disk: Path, arguments: tuple[str, ...], **how: Any) -> Run:
    options = ["--memory-limit", "64G", "--offload-dir", str(disk), "--max-restarts", "0"]
    return run_job(folder, script=SCRIPT, arguments=arguments, options=options, **how)


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event for journal in run.journals.values() for event in journal if event["event"] == kind]


def test_a_micro_batch_whose_activations_do_not_come_back_is_computed_again(tmp_path: Path, disk: Path) -> None:
    steps = STEPS
    faults = {
        "m1:activations:read:flip:1": "other bytes than were written",
        "m1:activations:read:eio:2": "Input/output error",
        "m1:activations:read:short:3": "short read",
        "m0:activations:write:torn:1": "other bytes than were written",
        "m0:activations:any:slow:2": None,
    }
    run = on_drives(tmp_path, disk, (*steps, "--faults", *faults), workers=2)
    assert_equal_to_undisturbed(run, *steps, script=SCRIPT)
    assert set(run.digests) == {"m0", "m1"}
    again = [(event["member"], event["reason"]) for event in events(run, "computed_again")]
    expected = [(name.partition(":")[0], reason) for name, reason in faults.items() if reason is not None]
    for member, reason in expected:
        assert any(who == member and reason in why for who, why in again), (member, reason, again)
    assert len(again) == len(expected)


def test_a_spill_that_compresses_is_packed_where_that_pays_and_changes_no_bit(tmp_path: Path, disk: Path) -> None:
    """A drive of 30 MB/s and idle cores: dropout's masks are worth it, also where a busy machine packs slowly."""
    steps = STEPS
    faults = [f"m{number}:activations:any:slow:0" for number in range(2)]
    run = on_drives(tmp_path, disk, (*steps, "--idle-cores", "2", "--faults", *faults), workers=2)
    assert_equal_to_undisturbed(run, *steps, script=SCRIPT)
    for member in run.digests:
        stats = profile.read(run.folder / "offload" / f"{member}.json").stats
        (drive,) = (each for each in stats.devices if each.written_bytes)
        assert any("Dropout" in each and each.endswith(": packed") for each in drive.packing), drive.packing
        assert drive.written_bytes < 0.9 * (stats.spilled_bytes - stats.forwarded_bytes)


def losses(members: int, steps: int) -> tuple[str, ...]:
    """A member is lost every other step: two backups of each shard, since new ones take some steps to be whole.

    Each member has one micro-batch of a step before the first loss.
    """
    return ("--steps", str(steps), "--micro-batches", str(members), "--run-length", "1", "--backups", "2")


def every_other_step(told: Sequence[str]) -> list[str]:
    """m1 from step 2 on, m2 from step 4 on, …"""
    return [f"m{number}:{each}:{2 * number}" for number, each in enumerate(told, start=1)]


def assert_only_m0_is_left(run: Run, *arguments: str) -> None:
    assert_equal_to_undisturbed(run, *arguments, script=SCRIPT)
    assert set(run.digests) == {"m0"}
    assert "Traceback" not in run.output


def test_drives_that_fail_for_good_and_a_kill_while_one_is_read_cost_a_member_each_and_no_bit(
    tmp_path: Path, disk: Path
) -> None:
    steps = losses(4, steps=8)
    told = every_other_step(("activations:write:full", "shards:read:eio", "reading"))
    run = on_drives(tmp_path, disk, (*steps, "--shards", "--faults", *told[:2], "--die-in", *told[2:]), workers=4)
    assert_only_m0_is_left(run, *steps)
    assert "is full ([Errno 28] No space left on device): free space there, or name another directory" in run.output
    assert "does not give back the optimizer state of shard" in run.output


@pytest.mark.on_demand
def test_every_way_in_which_a_drive_takes_no_more_activations(tmp_path: Path, disk: Path) -> None:
    steps = losses(6, steps=13)
    kinds = {
        "full": "No space left on device",
        "quota": "Disk quota exceeded",
        "gone": "No such device",
        "eio": "Input/output error",
        "short": "short write",
    }
    faults = every_other_step([f"activations:write:{kind}" for kind in kinds])
    run = on_drives(tmp_path, disk, (*steps, "--faults", *faults), workers=6)
    assert_only_m0_is_left(run, *steps)
    assert run.output.count("is full") == 2
    assert run.output.count("does not take activations") == 3
    for reason in kinds.values():
        assert reason in run.output


@pytest.mark.on_demand
def test_every_way_in_which_a_drive_loses_optimizer_states(tmp_path: Path, disk: Path) -> None:
    steps = losses(6, steps=13)
    kinds = ("read:eio", "read:flip", "write:full", "write:torn", "any:gone")
    faults = every_other_step([f"shards:{kind}" for kind in kinds])
    run = on_drives(tmp_path, disk, (*steps, "--shards", "--faults", *faults), workers=6)
    assert_only_m0_is_left(run, *steps)
    assert run.output.count("the optimizer state of shard") == len(kinds)
    assert run.output.count("other bytes came back than were written") == 2
    for reason in ("Input/output error", "No space left on device", "No such device"):
        assert reason in run.output


@pytest.mark.on_demand
def test_members_killed_in_every_state_of_an_activation_leave_nothing(tmp_path: Path, disk: Path) -> None:
    states = ("writing", "forwarded", "spilled", "reading", "reloaded", "failed", "leaving", "dropped")
    steps = losses(len(states) + 1, steps=19)
    die = every_other_step(states)
    wrong = [
        f"{member}:activations:read:flip:{step}"
        for member, state, step in (each.split(":") for each in die)
        if state in ("failed", "leaving")
    ]
    slow = [
        f"{member}:activations:any:slow:{step}"
        for member, state, step in (each.split(":") for each in die)
        if state in ("forwarded", "leaving")
    ]
    run = on_drives(tmp_path, disk, (*steps, "--die-in", *die, "--faults", *wrong, *slow), workers=len(states) + 1)
    assert_only_m0_is_left(run, *steps)  # whoever was not killed in the state that was meant is left too


def test_a_member_killed_with_its_shards_on_disk_leaves_nothing_there(tmp_path: Path, disk: Path) -> None:
    steps = STEPS
    kill = ["kill --target member:m0 --at step=2,phase=apply"]
    run = on_drives(tmp_path, disk, (*steps, "--shards"), workers=2, faults=kill)
    assert_equal_to_undisturbed(run, *steps, script=SCRIPT)
    assert set(run.digests) == {"m1"}
    rooms = [event for event in run.journals["m0"] if event["event"] == "room"]
    assert min(event["shards_on_disk"] for event in rooms) > 0
