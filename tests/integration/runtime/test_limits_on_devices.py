"""Memory limits of jobs on a device: kept with a loss, without a change of bits, stated beforehand, refused by name."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from experiments.accelerator.cases import reference_of
from experiments.accelerator.jobs import Job
from experiments.accelerator.jobs import run_job as run_judged
from experiments.accelerator.limits import PLACES, highest_bytes, limits
from experiments.accelerator.measures import Bench
from experiments.accelerator.models import Training, build
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


BROAD = Training(model="broad", members=2, steps=14, wait_from=3, peaks=True)
"""States of twice its parameters, and hardly any activations. One member is alone from step 2 until another joins."""
KILLED = ("kill --target member:m1 --at step=2,phase=backward",)
LIMIT_IN_PARAMETERS = 6
"""Device memory in units of the parameters. Two members need 5, one 7.5, and one that hands half over 7.

A newcomer's states are outside until its first step is measured, and come back once all shards have their holders.
"""


def of_device(journal: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the decisions about the device's memory."""
    return [each for each in journal if each["event"] == "room" and each["memory"] == "device memory"]


def test_a_primarys_states_leave_the_device_after_a_loss_and_come_back_with_a_newcomer(tmp_path: Path) -> None:
    parameters_bytes = sum(each.nbytes for each in build(replace(BROAD, device="cpu")).parameters())
    limit_bytes = LIMIT_IN_PARAMETERS * parameters_bytes
    (drive := tmp_path / "drive").mkdir()
    options = ("--memory-limit", str(limit_bytes), "--host-tier", "2M", "--offload-dir", str(drive))
    job = Job(training=BROAD, options=options, faults=KILLED, losses=1)
    ran = run_judged(job, tmp_path / "tight", deadline_s=400)
    assert ran.amiss(run_judged(Job(training=reference_of(BROAD)), tmp_path / "alone", deadline_s=300)) == {}
    assert highest_bytes(ran) <= limit_bytes
    journals = {
        path.stem: list(map(json.loads, path.read_text().splitlines())) for path in (ran.folder / "members").iterdir()
    }
    lone = journals["m0"]
    joined = max(at for at, each in enumerate(lone) if each["event"] == "view")
    assert of_device(lone)[0]["shards_on_disk"] == 0 < max(each["shards_on_disk"] for each in of_device(lone[:joined]))
    _, newcomer = lone[joined]["members"]
    backs = []
    for its in (of_device(lone[joined:]), of_device(journals[newcomer])):
        away = [each["shards_on_disk"] for each in its]
        assert max(away) > 0 == away[-1], away
        assert all(later <= earlier for earlier, later in pairwise(away)), f"states go to and fro: {away}"
        backs.append(sum("optimizer shards come back" in each["reason"] for each in its))
    assert max(backs) == 1, backs
    moved = [each for each in lone if each["event"] == "states_moved"]
    assert [(each["to"], each["by"]) for each in moved] == [(str(drive), "our own pinned copies")]
    assert moved[0]["read_bytes"] > 0 < moved[0]["written_bytes"]


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


def stated(*options: str) -> dict[str, Any]:
    """What `elastrain doctor --memory` states on the test device."""
    command = [sys.executable, "-m", "elastrain.launcher", "doctor", "--memory", str(SCRIPT), "--json", *options]
    asked = warm.run(command, env=environment(**ON_LATE), capture_output=True, text=True, timeout=240)
    assert asked.returncode == 0, asked.stderr
    return dict(json.loads(asked.stdout))


def test_the_arguments_of_init_are_those_of_the_flags() -> None:
    limits = {"memory_limit": 1 << 30, "host_memory_limit": 2 << 30, "host_tier": 1 << 20}
    told = stated("--", "--limits", json.dumps(limits))
    assert (told["limit"], told["host"]["limit"]) == (1 << 30, 2 << 30)
    assert [each["tier"] for each in told["host"]["members"]] == [1 << 20]


def test_the_doctor_states_both_memories_as_the_members_of_a_job_find_them(tmp_path: Path) -> None:
    limited = ("--memory-limit", "1G", "--host-memory-limit", "64G", "--host-tier", "1M")
    told = stated("--nproc-per-node", "2", *limited, "--", *ARGUMENTS)
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
