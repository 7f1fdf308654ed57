"""`elastrain run --resume` beside a script of a library that may resume from a checkpoint of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runtime.test_adapters import ACCELERATOR, TRAINER
from tests.support.training import run_job, undisturbed

pytestmark = pytest.mark.slow
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'elastrain[integrations]'")
pytest.importorskip("transformers", reason="transformers is not installed")
KILLS = tuple(f"kill --target member:m{number} --at step=9,phase=forward" for number in range(2))


@pytest.mark.parametrize(
    ("script", "own"), [(ACCELERATOR, "step_24"), (TRAINER, "checkpoint-8")], ids=["accelerate", "trainer"]
)
def test_a_new_life_goes_on_with_the_bits_and_a_checkpoint_of_the_scripts_own_beside_it_is_refused(
    tmp_path: Path, script: Path, own: str
) -> None:
    """Both together would count steps twice: data and loop would skip what was never trained."""
    alone = undisturbed("--out", str(tmp_path / "one"), script=script)
    arguments = ("--out", str(tmp_path / "job"))
    options = ("--max-restarts", "0", "--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "2")
    (tmp_path / "first").mkdir(), (tmp_path / "both").mkdir()
    first = run_job(tmp_path / "first", workers=2, arguments=arguments, options=options, faults=KILLS, script=script)
    assert first.exit_code == 0, first.output
    assert set(first.digests) == {"m2", "m3"}, "members of a new life"
    assert set(first.digests.values()) == set(alone.digests.values())
    options = (*options, "--resume", "auto")
    resumed = (*arguments, "--resume", str(tmp_path / "job" / own))
    both = run_job(tmp_path / "both", workers=2, arguments=resumed, options=options, script=script)
    assert both.exit_code == 1, both.output
    assert "the job has begun behind step 0 of the script's own checkpoints, and this process begins" in both.output
