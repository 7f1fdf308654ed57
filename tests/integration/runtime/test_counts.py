"""A number that the loop keeps is right on a member that joins later, or a sentence says that it must be registered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.training import SCRIPT, run_job

pytestmark = pytest.mark.slow

COUNTING = SCRIPT.parent / "counting_training.py"


@pytest.mark.parametrize("registers", [False, True], ids=["forgotten", "registered"])
def test_a_newcomer_has_the_count_or_says_that_it_needs_to_be_registered(tmp_path: Path, registers: bool) -> None:
    arguments = ["--register"] if registers else []
    faults = ["kill --target member:m0 --at step=3,phase=reduce"]
    run = run_job(tmp_path, workers=2, arguments=arguments, faults=faults, script=COUNTING, slow_until="m2")
    assert run.exit_code == 0, run.output
    counted = {member: int(count) for count, member in re.findall(r"counted (\d+) on (m\d)", run.output)}
    sentences = re.findall(r"m2 begins with step (\d+): the loop keeps numbers .* job\.register\(", run.output)
    if registers:
        assert (counted, sentences) == ({"m1": 1280, "m2": 1280}, []), run.output
    else:
        [step] = sentences
        assert f"\"counts['samples']\" is 0 here and {16 * int(step)} in the job" in run.output
        assert counted == {"m1": 1280, "m2": 1280 - 16 * int(step)}, run.output
