"""A cut of the ordinary programs: each in the ways that take little time."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.programs.program import PROGRAMS
from experiments.programs.run import QUICK, verdicts_of
from experiments.programs.verdicts import EQUAL, REFUSED, WRONG, judge
from experiments.programs.ways import Ran
from tests.support import warm


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_an_ordinary_program_trains_alike_in_all_ways(name: str, tmp_path: Path) -> None:
    found = verdicts_of(name, QUICK[name], tmp_path, start=warm.Popen)
    assert {way: verdict for way, verdict in found.items() if verdict.kind != EQUAL} == {}
    assert list(found) == list(QUICK[name])


def ran(output: str, code: int | None = 0) -> Ran:
    return Ran(code=code, output=output)


PLAIN = ran('SAYS {"loss": 1.0, "names": ["a"]}\nBITS 12 plain\n')
ONE = ran('SAYS {"loss": 1.00001, "names": ["a"]}\nDIGEST 34 56\n')
CASES = {
    "one": (ran('SAYS {"loss": 1.01, "names": ["a"]}\nDIGEST 34 56\n'), WRONG),
    "2": (ran('SAYS {"loss": 1.00001, "names": ["a"]}\nDIGEST 34 56\nDIGEST 34 57\n'), WRONG),
    "3": (ran('SAYS {"loss": 1.00001, "names": ["a"]}\nDIGEST 34 56\nDIGEST 34 56\n'), WRONG),
    "within": (ran('SAYS {"loss": 1.0, "names": ["a"]}\nBITS 13 within\n'), WRONG),
    "kill": (ran("elastrain: generation 1\nelastrain: SelfCounter is not elementwise\n", 1), REFUSED),
    "resume": (ran("Traceback (most recent call last):\nValueError: not elementwise\n", 1), WRONG),
    "stages": (ran("elastrain: the state is gone\n", 1), EQUAL),
    "save": (ran("", None), "stuck"),
}


@pytest.mark.parametrize("way", CASES)
def test_a_run_that_differs_is_found(way: str) -> None:
    found, kind = CASES[way]
    verdict = judge(PROGRAMS["self_counter"], way, found, {"plain": PLAIN, "one": ONE})
    assert verdict.kind == kind, verdict


def test_runs_that_agree_are_equal() -> None:
    found = {"plain": PLAIN, "one": ONE}
    assert [judge(PROGRAMS["self_counter"], way, each, found).kind for way, each in found.items()] == [EQUAL, EQUAL]
