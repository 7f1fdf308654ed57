"""A waiting worker of `--standby` takes the place of a lost one in a script of a library. The bits stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runtime.test_adapters import ACCELERATOR, TRAINER, rows, told
from tests.support.training import run_job, undisturbed

pytestmark = pytest.mark.slow
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'elastrain[integrations]'")
pytest.importorskip("transformers", reason="transformers is not installed")
KILLS = ("kill --target member:m1 --at step=6,phase=backward",)


@pytest.mark.parametrize(
    ("script", "more"),
    [(ACCELERATOR, ("--epochs", "4")), (TRAINER, ("--steps", "16"))],
    ids=["accelerate", "trainer"],
)
def test_a_waiting_worker_of_a_librarys_script_takes_the_place_of_a_lost_one(
    tmp_path: Path, script: Path, more: tuple[str, ...]
) -> None:
    alone = undisturbed("--out", str(tmp_path / "one"), *more, script=script)
    arguments = ("--out", str(tmp_path / "job"), *more, "--linger", "2")
    done = run_job(tmp_path, workers=2, arguments=arguments, options=("--standby",), faults=KILLS, script=script)
    assert alone.exit_code == done.exit_code == 0, alone.output + done.output
    assert any(event.get("standby") for event in done.events if event["event"] == "worker_start"), done.output
    assert set(done.digests) == {"m0", "m2"}
    assert set(done.digests.values()) == set(alone.digests.values())
    if script is TRAINER:
        assert told(done.output) == told(alone.output)
    else:
        assert rows(tmp_path / "job/log.jsonl") == rows(tmp_path / "one/log.jsonl")
