"""A short storm on real processes: some random models, their members killed and stopped at random moments."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.integration.training import ROOT

SEED, MINUTES, KILLS_MIN = 42, 1.2, 2
TIMEOUT_S = 900.0
"""A case under way is always brought to its end, on a slow machine too."""


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
def test_random_models_under_random_kills_end_as_undisturbed_ones() -> None:
    command = [sys.executable, "-m", "experiments.storm.run", "--seed", str(SEED), "--minutes", str(MINUTES)]
    done = subprocess.run(
        command,
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
