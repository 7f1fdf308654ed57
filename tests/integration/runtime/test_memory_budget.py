"""Members with too little memory: activations and optimizer shards go to disk, members are lost, the bits stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from elastrain.memory.memory_budget import WRITING_BYTES
from tests.support.training import SCRIPTS, Run, assert_equal_to_undisturbed, looked_at_by_many, run_job

SCRIPT = SCRIPTS / "squeezed_training.py"
MIB = 1 << 20

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == [], "something was left behind"


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event for journal in run.journals.values() for event in journal if event["event"] == kind]


def squeezed(folder: Path, disk: Path | None, limit_bytes: int, more: Sequence[str] = (), **how: Any) -> Run:
    folder.mkdir()
    options = ["--memory-limit", str(limit_bytes), "--max-restarts", "0"]
    options += [*more] if disk is None else ["--offload-dir", str(disk), *more]
    return run_job(folder, script=SCRIPT, options=options, **how)


def test_a_loss_within_the_limit_moves_activations_to_disk_and_changes_no_bit(tmp_path: Path, disk: Path) -> None:
    ample = squeezed(tmp_path / "ample", disk, 64 << 30, workers=3, arguments=("--steps", "3"))
    needs = events(ample, "room")[-1]
    assert needs["activations_bytes"] > 60 << 30
    assert needs["shards_on_disk"] == 0
    limit_bytes = (
        max(each["need_base_bytes"] for each in events(ample, "room"))
        + needs["need_parameters_bytes"]
        + needs["need_gradients_bytes"]
        + needs["need_activations_least_bytes"]
        + needs["need_shards_bytes"] // 2
        + 4 * MIB
    )
    arguments = ("--steps", "5")
    faults = ["kill --target member:m1 --at step=2,phase=backward"]
    run = squeezed(tmp_path / "tight", disk, limit_bytes, workers=3, arguments=arguments, faults=faults)
    assert_equal_to_undisturbed(run, *arguments, script=SCRIPT)
    assert set(run.digests) == {"m0", "m2"}
    assert any("of activations go to disk" in each["reason"] for each in events(run, "room"))
    assert max(each["peak_bytes"] for each in events(run, "memory")) <= limit_bytes
    assert (run.folder / "offload" / "m0.json").exists()


@pytest.mark.parametrize(
    ("directory", "why"),
    [
        ("/dev/shm", "is on tmpfs, which is memory itself"),
        ("nowhere", "is not a directory"),
        ("/proc", "no file can be made"),
    ],
)
def test_a_directory_that_is_unfit_is_refused_before_anything_is_started(
    tmp_path: Path, directory: str, why: str
) -> None:
    run = squeezed(tmp_path / "job", tmp_path / directory, 64 << 30, workers=2, arguments=("--steps", "1"))
    assert run.exit_code == 2
    assert run.output.count("\n") == 1
    assert run.output.startswith("elastrain: --offload-dir: ")
    assert why in run.output
    assert not run.folder.exists()


@pytest.mark.parametrize("source", ["--offload-dir", "ELASTRAIN_OFFLOAD_DIRS"])
def test_a_directory_without_a_limit_is_refused_before_anything_is_started(
    tmp_path: Path, disk: Path, source: str
) -> None:
    (tmp_path / "job").mkdir()
    is_option = source == "--offload-dir"
    options, inherited = ([source, str(disk)], {}) if is_option else ([], {source: str(disk)})
    run = run_job(tmp_path / "job", script=SCRIPT, options=options, workers=2, arguments=(), **inherited)
    assert run.exit_code == 2
    assert run.output == (
        f"elastrain: {source} {disk} is for what a memory limit leaves no room for: give --memory-limit too\n"
    )
    assert not run.folder.exists()


def test_a_plan_that_does_not_fit_ends_the_job_with_what_is_missing(tmp_path: Path, disk: Path) -> None:
    run = squeezed(tmp_path / "tiny", disk, 32 * MIB, workers=2, arguments=("--steps", "4"))
    assert run.exit_code == 1
    assert "MiB too small for this plan" in run.output
    assert "Traceback" not in run.output


WIDE = ("--width", "2048", "--layers", "3", "--micro-batch-size", "16")
"""Parameters of 35 MB under AdamW, hardly any activations: only shards can make room."""

PARAMETERS_BYTES = 35 * MIB

FAULTS = ["kill --target member:m1 --at step=2,phase=backward"]


@pytest.fixture(scope="module")
def peak_bytes() -> int:
    """What three members of `WIDE` hold at most."""
    arguments = ("--steps", "3", *WIDE)
    ample = looked_at_by_many(
        "ample room for WIDE", lambda folder: squeezed(folder / "job", None, 64 << 30, workers=3, arguments=arguments)
    )
    return max(each["peak_bytes"] for each in events(ample, "memory"))


@pytest.fixture(scope="module")
def tight_bytes(peak_bytes: int) -> int:
    """A limit at which three members have room for `WIDE`, and two have it without their new copies only.

    With the copies a member of two needs some 110 MiB more than three hold at most, without them some 30 MiB. Both
    vary by 20 MiB with the moments at which threads hold what they hold.
    """
    return peak_bytes + 2 * PARAMETERS_BYTES


def test_a_loss_moves_optimizer_shards_to_disk_and_changes_no_bit(tmp_path: Path, disk: Path, tight_bytes: int) -> None:
    arguments = ("--steps", "4", *WIDE)
    run = squeezed(tmp_path / "tight", disk, tight_bytes, workers=3, arguments=arguments, faults=FAULTS)
    assert_equal_to_undisturbed(run, *arguments, script=SCRIPT)
    assert set(run.digests) == {"m0", "m2"}
    for member in run.digests:
        on_disk = [each["shards_on_disk"] for each in events(run, "room") if each["member"] == member]
        assert on_disk[0] == 0
        assert on_disk[-1] > 0
    assert max(each["peak_bytes"] for each in events(run, "memory")) <= tight_bytes


def test_a_loss_that_leaves_no_room_for_copies_keeps_fewer_of_them_and_says_so(
    tmp_path: Path, tight_bytes: int
) -> None:
    arguments = ("--steps", "4", *WIDE)
    run = squeezed(tmp_path / "tight", None, tight_bytes, workers=3, arguments=arguments, faults=FAULTS)
    assert_equal_to_undisturbed(run, *arguments, script=SCRIPT)
    assert "has no room for copies of" in run.output
    assert max(each["peak_bytes"] for each in events(run, "memory")) <= tight_bytes


def test_a_loss_that_leaves_a_plan_without_room_ends_the_job_with_what_is_missing(
    tmp_path: Path, tight_bytes: int
) -> None:
    few_bytes = tight_bytes - 2 * PARAMETERS_BYTES
    run = squeezed(tmp_path / "tight", None, few_bytes, workers=3, arguments=("--steps", "4", *WIDE), faults=FAULTS)
    assert run.exit_code == 1
    assert "MiB too small for this plan" in run.output
    assert "--offload-dir" in run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize("layout", ["shared", "local"])
def test_checkpoints_keep_to_the_limit_and_change_no_bit(tmp_path: Path, peak_bytes: int, layout: str) -> None:
    """The room that is left is less than the states that a member writes, beside what writing itself takes."""
    # A plan counts some more than what was held: what may have come before others' memory was read.
    limit_bytes = peak_bytes + WRITING_BYTES + 24 * MIB
    place, arguments = tmp_path / "checkpoints", ("--steps", "4", *WIDE)
    more = ["--checkpoint-dir", str(place), "--checkpoint-every", "1", "--checkpoint-layout", layout]
    run = squeezed(tmp_path / "tight", None, limit_bytes, workers=3, arguments=arguments, more=more)
    assert_equal_to_undisturbed(run, *arguments, script=SCRIPT)
    assert max(each["peak_bytes"] for each in events(run, "memory")) <= limit_bytes
    assert max(each["captured_bytes"] for each in events(run, "memory")) > 0
    assert [each for each in events(run, "checkpoint") if not each["reason"]], run.output
