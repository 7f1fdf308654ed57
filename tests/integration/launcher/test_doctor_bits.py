"""`elastrain doctor --bits` on real scripts: what differs is named with code 1, and what does not is code 0."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.sources import ROOT
from tests.support.training import environment

PLANTED = ROOT / "experiments/bits/planted.py"

pytestmark = pytest.mark.slow


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastrain.launcher", "doctor", "--bits", *arguments]
    around = {name: value for name, value in environment().items() if name != "PYTHONHASHSEED"}
    return warm.run(command, env=around, capture_output=True, text=True, timeout=300)


def test_a_difference_ends_with_1_and_names_the_module_and_the_cause() -> None:
    asked = doctor(str(PLANTED), "--json", "--", "--plant", "counter")
    assert asked.returncode == 1, asked.stderr
    told = json.loads(asked.stdout)
    assert (told["module"], told["cause"], told["factor"], told["way"]) == ("planted", "counter", "order", "forward")


def test_a_healthy_script_ends_with_0(tmp_path: Path) -> None:
    asked = doctor(str(PLANTED))
    assert asked.returncode == 0, asked.stdout + asked.stderr
    assert asked.stdout.startswith("nothing differs: two members got the same bits from 3 micro-batches")


@pytest.mark.parametrize(
    ("text", "code", "sentence"),
    [
        ("print('done')", 2, "elastrain: {} ended without a micro-batch of job.steps, so there is nothing to compare"),
        ("raise RuntimeError('no data')", 1, "elastrain: {} ended with code 1 in its first step"),
    ],
)
def test_a_script_without_a_loop_ends_with_a_sentence(tmp_path: Path, text: str, code: int, sentence: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    asked = doctor(str(script), "--json")
    assert asked.returncode == code
    assert asked.stdout == ""
    assert asked.stderr.splitlines()[-1].startswith(sentence.format(script))
