"""The experiment with accelerators: its table, its cases, and its planted bugs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastrain.job.world import PHASES
from experiments.accelerator.cases import all_cases, reference_of
from experiments.accelerator.jobs import Job, Ran, total
from experiments.accelerator.measures import PARTS
from experiments.accelerator.models import SETUPS, Training
from experiments.accelerator.plants import PLANTS, changed_code
from experiments.accelerator.run import REACHES
from experiments.harness import ROOT

README = ROOT / "experiments" / "accelerator" / "README.md"
MEASURED_BY_HAND = {"test_seconds"}


def test_the_table_has_the_keys_and_their_reaches() -> None:
    rows = [line.split("|")[1:4] for line in README.read_text().splitlines() if line.startswith("| `")]
    told = {}
    for keys, _, reaches in rows:
        names, limits = re.findall(r"`(\w+)`", keys), [each.strip() for each in reaches.split(",")]
        told |= dict(zip(names, limits * (len(names) if len(limits) == 1 else 1), strict=True))
    assert {key: str(reach) for key, reach in REACHES.items()} == {k: v for k, v in told.items() if v != "–"}
    assert set(told) - set(REACHES) == MEASURED_BY_HAND
    assert {key for _, keys in PARTS.values() for key in keys} <= set(REACHES)


def test_cases_have_every_model_and_every_phase_at_every_place() -> None:
    cases = all_cases("late")
    names = {case.name for case in cases}
    assert len(names) == len(cases)
    assert {f"{model}, 3 members" for model in SETUPS} <= names
    places = ("", "stage 0: ", "stage 1: ", "stage 2: ")
    assert {f"{place}killed in {phase}" for place in places for phase in PHASES} <= names
    assert all(reference_of(case.job.training).device == "cpu" for case in cases)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_has_its_place_in_the_product(name: str) -> None:
    function, code = changed_code(PLANTS[name])
    assert code.co_freevars == function.__code__.co_freevars and code.co_code != function.__code__.co_code


def test_races_are_counted_from_facts_and_from_tracebacks(tmp_path: Path) -> None:
    for part in ("steps", "facts"):
        (tmp_path / part).mkdir()
    (tmp_path / "facts" / "m0.jsonl").write_text('{"step": 0, "races": ["a"], "descriptors": 9}\n')
    (tmp_path / "output.log").write_text("RaceError: b\nelastrain: m1 ended by SIGSEGV\n")
    ran = Ran(folder=tmp_path, job=Job(training=Training()), code=0)
    assert ran.races == ["a", "b"] and ran.touches == 1
    assert total([{"races": ran.races, "digest": "wrong"}, {"races": ["c"], "steps_lost": 2}]) == {
        "races": 3,
        "digest": 1,
        "steps_lost": 2,
    }
