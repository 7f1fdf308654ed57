"""Members of pipelines with too little memory: each keeps its limit with its own blocks, and the bits stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import SCRIPTS, Run, assert_equal_to_undisturbed, looked_at_by_many, run_job

SCRIPT = SCRIPTS / "piped_training.py"
MIB = 1 << 20
# An odd size: nothing is a multiple of anything.
SIZES = ("--micro-batch-size", "1537")

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == [], "something was left behind"


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event for journal in run.journals.values() for event in journal if event["event"] == kind]


def limited(folder: Path, disk: Path | None, limit_bytes: int, workers: int, stages: int | str, **how: Any) -> Run:
    folder.mkdir(parents=True)
    options = ["--memory-limit", str(limit_bytes), "--stages", str(stages), "--max-restarts", "0"]
    options += [] if disk is None else ["--offload-dir", str(disk)]
    return run_job(folder, script=SCRIPT, options=options, workers=workers, **how)


@pytest.fixture(scope="module")
def ample() -> Run:
    def run(folder: Path) -> Run:
        (folder / "disk").mkdir()
        return limited(folder / "job", folder / "disk", 64 << 30, 3, 3, arguments=("--steps", "3", *SIZES))

    return looked_at_by_many("ample room for a pipeline", run)


def test_what_is_expected_of_activations_is_what_is_saved(ample: Run) -> None:
    for member, in_flight in (("m0", 3), ("m1", 2), ("m2", 1)):
        told = [e["need_activations_bytes"] for e in events(ample, "room") if e["member"] == member]
        # Between two steps, when blocks go, what was measured of one micro-batch is all that is known.
        measured_bytes = min(each for each in told if each)
        assert 0.9 < max(told) / (in_flight * measured_bytes) < 1.1


# In one pipeline two are left with all blocks between them; of two pipelines each member has fewer from the start.
# The second limit lies between what one operation needs and what would leave room for all: five MiB from either.
@pytest.mark.parametrize(("workers", "stages", "more"), [(3, 3, 0.5), (4, 2, -0.2)])
def test_a_loss_within_the_limit_moves_activations_to_disk_and_changes_no_bit(
    tmp_path: Path, disk: Path, ample: Run, workers: int, stages: int, more: float
) -> None:
    activations_bytes = max(e["activations_bytes"] for e in events(ample, "memory"))
    limit_bytes = max(e["peak_bytes"] for e in events(ample, "memory")) + round(more * activations_bytes)
    arguments = ("--steps", "5", *SIZES)
    faults = ["kill --target member:m1 --at step=2,phase=backward"]
    run = limited(tmp_path / "tight", disk, limit_bytes, workers, stages, arguments=arguments, faults=faults)
    assert_equal_to_undisturbed(run, *arguments, script=SCRIPT)
    assert set(run.digests) == {f"m{rank}" for rank in range(workers)} - {"m1"}
    assert any("of activations go to disk" in each["reason"] for each in events(run, "room"))
    assert max(each["peak_bytes"] for each in events(run, "memory")) <= limit_bytes
    # From the first commit on members have fewer blocks, but at the end everything again. Who has which follows from
    # plan and placement, so that one may have all of them; and a decision about room is told only where it matters.
    holds = [event for event in events(run, "holds") if event["member"] in run.digests]
    whole_bytes = {[e["parameters_bytes"] for e in holds if e["member"] == member][-1] for member in run.digests}
    assert len(whole_bytes) == 1
    assert min(event["parameters_bytes"] for event in holds) < max(whole_bytes)


def test_a_limit_under_which_no_task_fits_ends_the_job_with_what_would_fit(tmp_path: Path, ample: Run) -> None:
    fixed_bytes = max(e["need_base_bytes"] for e in events(ample, "room"))
    run = limited(tmp_path / "tiny", None, fixed_bytes + 10 * MIB, 3, 3, arguments=("--steps", "3", *SIZES))
    assert run.exit_code == 1
    assert "MiB too small for this plan" in run.output
    assert "of its blocks 'layers." in run.output
    assert "legal cuts: before 'layers.0', before 'layers.1'" in run.output
    assert "--stages" in run.output
    assert "Traceback" not in run.output


def test_at_the_end_gradients_make_room_for_the_whole_model(tmp_path: Path) -> None:
    arguments = ("--steps", "3", "--width", "1024", "--micro-batch-size", "9")
    run = limited(tmp_path / "job", None, 64 << 30, 2, 2, arguments=arguments)
    assert_equal_to_undisturbed(run, *arguments, script=SCRIPT)
    for member in ("m0", "m1"):
        holds = [event for event in events(run, "holds") if event["member"] == member]
        own, whole = holds[-2]["parameters_bytes"], holds[-1]["parameters_bytes"]
        assert whole > 20 * MIB > own
        # Besides the model itself nothing that others read: no slot, no sum, no kept gradient.
        assert holds[-1]["shared_bytes"] < 1.5 * whole
