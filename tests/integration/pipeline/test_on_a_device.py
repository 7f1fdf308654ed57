"""Pipelines of members on the test device: the bits are those of the CPU's job of one, and the loop does not wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.pipeline.test_pipelines import assert_every_step_is_that_of_one, lines, trained

WAITS_OF_STEP = 2
"""Of a whole step; it has six micro-batches, and each of them crosses the cut in both directions."""
LATE = ("--device", "late")


def test_on_a_device_boundary_tensors_cost_no_wait_and_change_no_bit(tmp_path: Path) -> None:
    arguments = ("--case", "encoder-decoder", "--steps", "4")
    run = trained(tmp_path, 2, 2, *arguments, *LATE)
    assert_every_step_is_that_of_one(run, *arguments)
    assert "RaceError" not in run.output and len(run.digests) == 2
    waits = {member: [int(line.split()[1]) for line in its] for member, its in lines(run, "waits").items()}
    assert waits.keys() == {"m0", "m1"} and all(max(its[2:]) <= WAITS_OF_STEP for its in waits.values()), waits


@pytest.mark.parametrize(
    ("place", "phase"),
    [
        pytest.param(0, "backward", marks=pytest.mark.on_demand),
        (1, "backward"),
        pytest.param(2, "backward", marks=pytest.mark.on_demand),
        pytest.param(0, "publish", marks=pytest.mark.on_demand),
        pytest.param(1, "forward", marks=pytest.mark.on_demand),
        pytest.param(2, "commit", marks=pytest.mark.on_demand),
    ],
)
def test_on_a_device_a_loss_at_any_place_of_a_pipeline_changes_no_bit(tmp_path: Path, place: int, phase: str) -> None:
    arguments = ("--steps", "8")
    step = 0 if phase == "publish" else 2
    run = trained(
        tmp_path, 3, 3, *arguments, *LATE, faults=(f"kill --target member:m{place} --at step={step},phase={phase}",)
    )
    assert_every_step_is_that_of_one(run, *arguments)
    assert [(member, at) for member, _, at in run.phases_struck()] == [(f"m{place}", phase)]
    assert "RaceError" not in run.output
