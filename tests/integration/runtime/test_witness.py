"""One flipped bit in one member's memory: the job ends with a sentence, or its bits are those of the undisturbed one.

Never another digest with exit code 0.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import SCRIPT, assert_equal_to_undisturbed, run_job

pytestmark = pytest.mark.slow
FLIPPED = SCRIPT.parent / "flipped_training.py"


@pytest.mark.parametrize("backups", ["1", "2"])
@pytest.mark.parametrize("what", ["own", "taken"])
def test_a_bit_of_the_parameters_that_flips_between_two_steps_ends_the_job_with_a_sentence(
    tmp_path: Path, what: str, backups: str
) -> None:
    arguments = ("--backups", backups, "--flip", f"m0:8:{what}")
    run = run_job(tmp_path, workers=3, arguments=arguments, script=FLIPPED)
    assert run.exit_code != 0, f"went on with {run.digests}"
    (end,) = [e for e in run.events if e["event"] == "end"]
    assert "m0" in end["reason"], end
    assert "shard" in end["reason"], end
    assert end["reason"] in run.output


@pytest.mark.parametrize("backups", ["1", "2"])
def test_a_bit_of_a_backups_state_that_flips_costs_that_member_and_no_bit(tmp_path: Path, backups: str) -> None:
    arguments = ("--backups", backups)
    run = run_job(tmp_path, workers=3, arguments=(*arguments, "--flip", "m0:8:state"), script=FLIPPED)
    assert_equal_to_undisturbed(run, *arguments, script=FLIPPED)
    assert "m0" not in run.digests
    assert "what m0 keeps has changed in its memory" in run.output
