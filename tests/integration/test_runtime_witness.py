"""One flipped bit in one member's memory: the job ends with a sentence, or its bits are those of the undisturbed one.

Never another digest with exit code 0.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.training import SCRIPT, run_job

pytestmark = pytest.mark.slow
FLIPPED = SCRIPT.parent / "flipped_training.py"


@pytest.mark.parametrize("backups", ["1", "2"])
@pytest.mark.parametrize("what", ["own"])
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
