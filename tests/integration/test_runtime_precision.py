"""Half precision and running statistics: workers are killed, the bits are those of the undisturbed job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.training import PRECISION, assert_equal_to_undisturbed, run_job, undisturbed

pytestmark = pytest.mark.slow

KILLS = (
    "kill --target member:m1 --at step=10,phase=backward",
    "kill --target member:m2 --at step=15,phase=publish",
)


@pytest.mark.parametrize("precision", ["mixed", "autocast"])
def test_half_precision_survives_two_kills_bit_for_bit(tmp_path: Path, precision: str) -> None:
    arguments = ("--steps", "20", "--precision", precision)
    run = run_job(tmp_path, workers=3, script=PRECISION, arguments=arguments, faults=KILLS)
    assert_equal_to_undisturbed(run, *arguments, script=PRECISION)
    assert {phase for _, _, phase in run.phases_struck()} == {"backward", "publish"}


def test_one_autocast_around_the_loop_computes_with_the_weights_of_each_step() -> None:
    arguments = ("--steps", "20", "--precision", "autocast")
    inside, around = undisturbed(*arguments, script=PRECISION), undisturbed(*arguments, "--around", script=PRECISION)
    assert inside.digests == around.digests != {}
    assert inside.digests != undisturbed("--steps", "20", script=PRECISION).digests
