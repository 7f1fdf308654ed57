"""A short storm on real processes: one random model, a member killed while it is idle and others compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.training import ROOT

CASE, KILLS_MIN = 421304, 1
"""Three workers, 21 steps of about half a second: half a minute where nobody else computes."""
TIMEOUT_S = 900.0
"""Longer than the storm itself gives a job: what takes so long is reported by the storm."""


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
def test_a_random_model_under_random_kills_ends_as_the_undisturbed_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "experiments.storm.run", "--case", str(CASE)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    wrong = {name: found[name] for name in ("digest_mismatches", "hangs", "false_ends", "leftovers")}
    assert wrong == dict.fromkeys(wrong, 0), done.stdout
    assert found["kills"] >= KILLS_MIN, done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
