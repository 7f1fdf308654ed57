"""A worker that replaces a lost one takes part in the shared evaluations of a library's loop, and in its steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.runtime.test_adapters import ACCELERATOR, TRAINER, rows, told
from tests.support.training import run_job, undisturbed

pytestmark = pytest.mark.slow
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'elastrain[integrations]'")
pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize(
    ("script", "more"),
    [(ACCELERATOR, ("--epochs", "4")), (TRAINER, ("--steps", "16", "--more", "metrics=1"))],
    ids=["accelerate", "trainer"],
)
def test_a_newcomer_shares_the_evaluations_behind_the_one_in_which_a_member_was_lost(
    tmp_path: Path, script: Path, more: tuple[str, ...]
) -> None:
    """The newcomer has not seen the first evaluation, in which m1 was lost, and has the modes of the others."""
    alone = undisturbed("--out", str(tmp_path / "one"), *more, script=script)
    arguments = ("--out", str(tmp_path / "job"), *more, "--linger", "2", "--kill-evaluating", "m1")
    done = run_job(tmp_path, workers=2, arguments=arguments, script=script)
    assert alone.exit_code == done.exit_code == 0, alone.output + done.output
    assert "m1 ended by SIGKILL" in done.output
    assert set(done.digests.values()) == set(alone.digests.values())
    if script is TRAINER:
        assert told(done.output) == told(alone.output)
    else:
        assert rows(tmp_path / "job/log.jsonl") == rows(tmp_path / "one/log.jsonl")
    computed = dict(re.findall(r"(m\d+) evaluated (\d+)", done.output))
    assert set(computed) == {"m0", "m2"} and int(computed["m2"]) > 0
