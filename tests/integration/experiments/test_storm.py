"""A short storm on real processes: one random model, a member killed while it is idle and others compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.storm.cases import draw
from experiments.storm.one import run_case
from experiments.storm.surroundings import PLAIN
from tests.support import warm

CASE, KILLS_MIN = 421304, 1
"""Three workers, steps of about half a second; the kill comes after the third."""
STEPS = 8
"""Of the 21 that are drawn: enough for the backups to be whole again and a newcomer to take part."""
TIMEOUT_S = 900.0
"""Longer than the storm itself gives a job: what takes so long is reported by the storm."""


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
def test_a_random_model_under_random_kills_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    case = draw(CASE)
    training = replace(case.training, steps=STEPS)
    plain = replace(case, training=training, started=PLAIN, faults=case.faults[:1])
    outcome = run_case(plain, tmp_path / "case", start=warm.Popen)
    told = "\n".join([*outcome.struck, *outcome.sentences()])
    assert not outcome.failed and not outcome.too_slow, told
    assert outcome.kills >= KILLS_MIN, told
