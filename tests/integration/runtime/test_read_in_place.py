"""Members that read each other's device memory in place, in real jobs: exporters are killed, and no bit changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import SCRIPTS, Run, assert_equal_to_undisturbed, run_job

pytestmark = pytest.mark.slow
SCRIPT = SCRIPTS / "device_training.py"
ARGUMENTS = ("--steps", "12", "--backups", "all")
STEP = 3


def run(folder: Path, *faults: str, settings: dict[str, Any] | None = None, slow_until: str | None = "m3") -> Run:
    given = {"DEVICE_FAULTS": "", "DEVICE_IN_PLACE": "1", "LATE": json.dumps(settings or {})}
    return run_job(folder, workers=3, script=SCRIPT, arguments=ARGUMENTS, faults=faults, slow_until=slow_until, **given)


def told(done: Run) -> dict[str, list[tuple[bool, str]]]:
    """Member -> what its journal says about device memory: whether it is read in place, and why not."""
    return {
        member: [(e["read_in_place"], e.get("reason", "")) for e in events if e["event"] == "device_memory"]
        for member, events in done.journals.items()
    }


@pytest.mark.parametrize(
    "phase",
    [
        "backward",
        "publish",
        *(pytest.param(phase, marks=pytest.mark.on_demand) for phase in ("forward", "reduce", "commit", "apply")),
    ],
)
def test_the_memory_of_a_killed_member_is_read_on_and_no_bit_changes(tmp_path: Path, phase: str) -> None:
    done = run(tmp_path, f"kill --target member:m1 --at step={STEP},phase={phase}")
    assert_equal_to_undisturbed(done, *ARGUMENTS, script=SCRIPT)
    assert [(member, at) for member, _, at in done.phases_struck()] == [("m1", phase)]
    assert told(done) == {member: [(True, "")] for member in ("m0", "m1", "m2", "m3")}
    assert "RaceError" not in done.output and "SIGSEGV" not in done.output
    assert len(list(done.folder.glob("device-memory-*.json"))) == 1


def test_where_the_probe_fails_everything_is_carried(tmp_path: Path) -> None:
    done = run(tmp_path, settings={"unreadable": True}, slow_until=None)
    assert_equal_to_undisturbed(done, *ARGUMENTS, script=SCRIPT)
    reason = "the probe of shared device memory failed: "
    for said in told(done).values():
        [(in_place, why)] = said
        assert not in_place and why.startswith(reason) and "reads no memory of peers" in why


def test_what_finds_no_room_on_the_device_is_carried(tmp_path: Path) -> None:
    done = run(tmp_path, f"kill --target member:m1 --at step={STEP},phase=reduce", settings={"shareable_bytes": 16384})
    assert_equal_to_undisturbed(done, *ARGUMENTS, script=SCRIPT)
    assert told(done) == {member: [(True, "")] for member in ("m0", "m1", "m2", "m3")}
    full = {
        member for member, events in done.journals.items() if any(e["event"] == "device_memory_full" for e in events)
    }
    assert {"m0", "m2"} <= full
