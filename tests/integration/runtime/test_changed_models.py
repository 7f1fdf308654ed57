"""What a loop changes in its model, and an optimizer in its groups, reaches newcomers and resumed jobs bit for bit."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from tests.support.shared import once
from tests.support.training import SCRIPTS, Run, run_job

SCRIPT = SCRIPTS / "changing_training.py"


def _said(run: Run) -> set[str]:
    assert run.exit_code == 0, run.output
    return set(re.findall(r"SAID .*", run.output))


@functools.cache
def _alone() -> set[str]:
    def make(folder: Path) -> None:
        (folder / "said").write_text("\n".join(_said(run_job(folder, workers=1, arguments=(), script=SCRIPT))))

    return set((once("changed models", make) / "said").read_text().splitlines())


def test_a_job_of_one_counts_every_step_once() -> None:
    (said,) = _alone()
    assert said.endswith("8.0 12.0 2.0 True [0.5, 2.0] 12 12")


def test_a_member_that_joins_later_has_it_all(tmp_path: Path) -> None:
    faults = ["kill --target member:m1 --at step=4,phase=forward"]
    run = run_job(tmp_path, workers=2, arguments=(), faults=faults, script=SCRIPT, slow_until="m2")
    assert _said(run) == _alone()
    assert "m2" in run.journals


def test_a_resumed_job_has_it_all(tmp_path: Path) -> None:
    options = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "2")
    faults = ["kill --target member:m0 --at step=8,phase=forward"]
    run = run_job(tmp_path, workers=1, arguments=("--pause", "0.3"), faults=faults, options=options, script=SCRIPT)
    assert "life 2 begins" in run.output
    assert _said(run) == _alone()
