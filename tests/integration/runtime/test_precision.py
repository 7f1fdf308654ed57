"""Half precision and running statistics: workers are killed, the bits are those of the undisturbed job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.training import PRECISION, Run, assert_equal_to_undisturbed, run_job, undisturbed

pytestmark = pytest.mark.slow

KILLS = (
    "kill --target member:m1 --at step=4,phase=backward",
    "kill --target member:m2 --at step=9,phase=publish",
)
KILLS_OF_ALL_BUT_ONE = (
    "kill --target member:m1 --at step=4,phase=backward",
    "kill --target member:m2 --at step=9,phase=reduce",
)


@pytest.mark.parametrize("precision", ["mixed", "autocast"])
def test_half_precision_survives_two_kills_bit_for_bit(tmp_path: Path, precision: str) -> None:
    arguments = ("--steps", "14", "--precision", precision)
    run = run_job(tmp_path, workers=3, script=PRECISION, arguments=arguments, faults=KILLS)
    assert_equal_to_undisturbed(run, *arguments, script=PRECISION)
    assert {phase for _, _, phase in run.phases_struck()} == {"backward", "publish"}


def test_float16_survives_kills_in_steps_that_overflow_and_newcomers_get_the_scale(tmp_path: Path) -> None:
    arguments = ("--steps", "20", "--precision", "float16")
    alone = undisturbed(*arguments, script=PRECISION)
    told = {e["step"]: (e["skipped"], e["loss_scale"]) for e in _passed(alone)}
    overflowed = [step for step, (skipped, _) in told.items() if skipped]
    assert overflowed[:2] == [0, 1], "the first scales are too large for float16"
    later = next(step for step in overflowed if step > 5)
    faults = [
        "kill --target member:m1 --at step=1,phase=commit",
        f"kill --target member:m2 --at step={later},phase=apply",
    ]
    lingering = (*arguments, "--linger", "2")
    run = run_job(tmp_path, workers=3, script=PRECISION, arguments=lingering, faults=faults)
    assert_equal_to_undisturbed(run, *arguments, script=PRECISION)
    assert {(step, phase) for _, step, phase in run.phases_struck()} == {(1, "commit"), (later, "apply")}
    for events in run.journals.values():
        for e in events:
            if e["event"] == "passed":
                assert (e["skipped"], e["loss_scale"]) == told[e["step"]]
    joined = [m for m, events in run.journals.items() if m >= "m3" and any(e["event"] == "passed" for e in events)]
    assert joined, "a newcomer takes part"
    assert len({scale for _, scale in told.values()}) > 3, "it falls and rises"


def test_running_statistics_are_those_of_a_job_of_one_whoever_dies(tmp_path: Path) -> None:
    arguments = ("--steps", "20", "--batch-norm")
    run = run_job(
        tmp_path, workers=3, script=PRECISION, arguments=(*arguments, "--linger", "2"), faults=[*KILLS_OF_ALL_BUT_ONE]
    )
    assert_equal_to_undisturbed(run, *arguments, script=PRECISION)
    assert [phase for _, _, phase in run.phases_struck()] == ["backward", "reduce"]
    told = {line.partition("digest")[2] for line in run.output.splitlines() if "buffers" in line}
    alone = undisturbed(*arguments, script=PRECISION)
    assert told == {alone.output.partition("digest")[2].rstrip()}, "the layers' own buffers too"
    assert "200.0" in alone.output, "ten micro-batches in each of twenty steps were tracked"


def _passed(run: Run) -> list[dict[str, Any]]:
    return [e for events in run.journals.values() for e in events if e["event"] == "passed"]


def test_one_autocast_around_the_loop_computes_with_the_weights_of_each_step() -> None:
    arguments = ("--steps", "14", "--precision", "autocast")
    inside, around = undisturbed(*arguments, script=PRECISION), undisturbed(*arguments, "--around", script=PRECISION)
    assert inside.digests == around.digests != {}
    assert inside.digests != undisturbed("--steps", "14", script=PRECISION).digests
