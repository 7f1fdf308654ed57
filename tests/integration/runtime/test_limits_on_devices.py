"""Memory limits of jobs on a device: kept with a loss, without a change of bits, stated beforehand, refused by name."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from experiments.accelerator.cases import reference_of
from experiments.accelerator.jobs import Job, Ran
from experiments.accelerator.jobs import run_job as run_judged
from experiments.accelerator.limits import PLACES, highest_bytes, limits
from experiments.accelerator.measures import Bench
from experiments.accelerator.models import Training
from tests.support import warm
from tests.support.training import SCRIPTS, Run, environment, run_job

pytestmark = pytest.mark.slow
SCRIPT = SCRIPTS / "device_training.py"
ON_LATE = {"DEVICE_FAULTS": "", "DEVICE_SHARED": "late-x"}
ARGUMENTS = ("--steps", "3")


def run(folder: Path, *options: str, **given: str) -> Run:
    return run_job(folder, workers=2, script=SCRIPT, arguments=ARGUMENTS, options=options, **(given or ON_LATE))


def test_a_limit_of_device_memory_is_kept_with_a_loss_and_changes_no_bit(tmp_path: Path) -> None:
    bench = Bench(folder=tmp_path, start=warm.Popen)
    found = limits(bench)
    assert found["limit_kept"] <= 1, found
    assert found["limit_bits_equal"] == 1
    assert set(found["limit_left_to"]) == PLACES
    assert [ran.races for _, ran in bench.ran] == [[], [], []]


WIDE = Training(model="wide", members=2, steps=14, wait_from=5, peaks=True)
"""States of 10 MB and hardly any activations. One member is alone from step 2 to step 5, and its newcomer joins."""
KILLED = ("kill --target member:m1 --at step=2,phase=backward",)


def rooms(ran: Ran) -> list[dict[str, Any]]:
    """Return the decisions about the device's memory of the member that is never killed."""
    lines = (ran.folder / "members" / "m0.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["event"] == "room" and each["memory"] == "device memory"]


def test_a_primarys_states_leave_the_device_after_a_loss_and_come_back_with_a_newcomer(tmp_path: Path) -> None:
    def job(limit_bytes: int, *more: str, name: str) -> Ran:
        options = ("--memory-limit", str(limit_bytes), *more)
        return run_judged(Job(training=WIDE, options=options, faults=KILLED, losses=1), tmp_path / name, deadline_s=300)

    ample = job(1 << 30, name="ample")
    alone = max(rooms(ample), key=lambda each: (each["need_shards_bytes"], -each["need_gradients_bytes"]))
    parts = ("base", "parameters", "gradients", "shards")
    limit_bytes = sum(alone[f"need_{part}_bytes"] for part in parts) - alone["need_shards_bytes"] // 5
    (drive := tmp_path / "drive").mkdir()
    ran = job(limit_bytes, "--host-tier", "2M", "--offload-dir", str(drive), name="tight")
    assert ran.amiss(run_judged(Job(training=reference_of(WIDE)), tmp_path / "alone", deadline_s=300)) == {}
    away = [each["shards_on_disk"] for each in rooms(ran)]
    assert away[0] == 0 < max(away), away
    assert any(later < earlier for earlier, later in pairwise(away)), f"none has come back: {away}"
    journal = list(map(json.loads, (ran.folder / "members" / "m0.jsonl").read_text().splitlines()))
    moved = [each for each in journal if each["event"] == "states_moved"]
    assert [(each["to"], each["by"]) for each in moved] == [(str(drive), "our own pinned copies")]
    assert moved[0]["read_bytes"] > 0 < moved[0]["written_bytes"]
    if (peak_bytes := highest_bytes(ran)) > limit_bytes:
        pytest.xfail(f"the device's peak is {peak_bytes:,} bytes of {limit_bytes:,} allowed: an open defect")


@pytest.mark.parametrize(
    ("options", "given", "says"),
    [
        (("--memory-limit", "64G"), ON_LATE, "--memory-limit allows 68,719,476,736 bytes of device memory, and late:0"),
        (("--memory-limit", "4K"), ON_LATE, "a member's device memory limit is 1 MiB too small for this plan"),
        (("--host-memory-limit", "1M"), ON_LATE, "a member's host memory limit is"),
        (
            ("--memory-limit", "4G", "--host-tier", "1M"),
            {"X": ""},
            "--host-tier is host memory for what leaves a device",
        ),
    ],
)
def test_a_limit_that_cannot_be_kept_ends_the_job_with_a_sentence(
    tmp_path: Path, options: tuple[str, ...], given: dict[str, str], says: str
) -> None:
    done = run(tmp_path, *options, **given)
    assert done.exit_code in (1, 2)
    assert says in done.output
    assert "Traceback" not in done.output


def test_the_arguments_of_init_are_those_of_the_flags() -> None:
    limits = {"memory_limit": 1 << 30, "host_memory_limit": 2 << 30, "host_tier": 1 << 20}
    command = [sys.executable, "-m", "elastrain.launcher", "doctor", "--memory", str(SCRIPT), "--json"]
    asked = warm.run(
        [*command, "--", "--limits", json.dumps(limits)],
        env=environment(**ON_LATE),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert asked.returncode == 0, asked.stderr
    told = json.loads(asked.stdout)
    assert (told["limit"], told["host"]["limit"]) == (1 << 30, 2 << 30)
    assert [each["tier"] for each in told["host"]["members"]] == [1 << 20]


def test_the_doctor_states_both_memories_as_the_members_of_a_job_find_them(tmp_path: Path) -> None:
    limited = ("--memory-limit", "1G", "--host-memory-limit", "64G", "--host-tier", "1M")
    command = [sys.executable, "-m", "elastrain.launcher", "doctor", "--memory", str(SCRIPT), "--nproc-per-node", "2"]
    asked = warm.run(
        [*command, *limited, "--json", "--", *ARGUMENTS],
        env=environment(**ON_LATE),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert asked.returncode == 0, asked.stderr
    told = json.loads(asked.stdout)
    assert (told["memory"], told["host"]["memory"]) == ("device memory", "host memory")
    assert (told["limit"], told["host"]["limit"]) == (1 << 30, 64 << 30)
    job = run(tmp_path, *limited)
    assert job.exit_code == 0, job.output
    for device, host in zip(told["members"], told["host"]["members"], strict=True):
        journal = job.journals[device["member"]]
        first = next(each for each in journal if each["event"] == "room")
        assert first["memory"] == "device memory"
        assert device["model"] == first["need_parameters_bytes"]
        assert device["gradients"] == pytest.approx(first["need_gradients_bytes"], rel=0.05)
        assert device["shards"] == pytest.approx(first["need_shards_bytes"], rel=0.05)
        assert (device["backups"], host["shards"], host["model"]) == (0, 0, 0)
        assert host["backups"] > 0 and host["tier"] == 1 << 20
        peaks = [each["peak_bytes"] for each in journal if each["event"] == "memory"]
        assert max(peaks) <= device["total"]
        # No bound from above: the bytes of the test device lie in its process.
        on_host = [each["peak_bytes"] for each in journal if each["event"] == "host_memory"]
        assert len(on_host) == 3 and host["base"] < max(on_host) < 64 << 30
