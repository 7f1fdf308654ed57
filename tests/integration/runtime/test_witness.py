"""One flipped bit in one member's memory: it is put right, and the bits are those of the undisturbed job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import SCRIPT, assert_equal_to_undisturbed, run_job

pytestmark = pytest.mark.slow
FLIPPED = SCRIPT.parent / "flipped_training.py"


@pytest.mark.parametrize("backups", ["1", "2"])
@pytest.mark.parametrize(("what", "says"), [("own", "of shard"), ("taken", "other parameters"), ("state", "m0 keeps")])
def test_a_bit_that_flips_between_two_steps_is_put_right_and_costs_nobody(
    tmp_path: Path, what: str, says: str, backups: str
) -> None:
    arguments = ("--backups", backups)
    run = run_job(tmp_path, workers=3, arguments=(*arguments, "--flip", f"m0:8:{what}"), script=FLIPPED)
    assert_equal_to_undisturbed(run, *arguments, script=FLIPPED)
    assert set(run.digests) == {"m0", "m1", "m2"}
    noticed = [e["noticed"] for e in run.events if e["event"] == "note" and "noticed" in e]
    assert any("m0" in each and says in each and "begins anew" in each for each in noticed), noticed
