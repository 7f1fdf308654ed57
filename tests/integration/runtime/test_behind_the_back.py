"""What would silently do nothing, or make members differ, is refused by name; what does no harm is let through."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import warm
from tests.support.shared import once
from tests.support.training import ROOT, SCRIPT, environment

pytestmark = pytest.mark.slow

CASES = SCRIPT.parent / "behind_the_back.py"


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@functools.cache
def _done() -> Done:
    """All cases, one after the other in one process; told on standard output, problems on standard error."""

    def make(folder: Path) -> None:
        command = [sys.executable, str(CASES)]
        done = warm.run(command, env=environment(), capture_output=True, text=True, timeout=250, cwd=ROOT)
        (folder / "ended.json").write_text(json.dumps([done.returncode, done.stdout, done.stderr]))

    return Done(*json.loads((once("behind the back", make) / "ended.json").read_text()))


def _told() -> dict[str, str]:
    done = _done()
    assert done.returncode == 0, done.stderr
    return {name.strip(): told.strip() for name, _, told in (line.partition("|") for line in done.stdout.splitlines())}


@pytest.mark.parametrize(
    "case",
    ["evaluation after the step", "evaluation before the step", "evaluation within it", "backward before the loop"],
)
def test_what_does_no_harm_changes_no_bit(case: str) -> None:
    told = _told()
    assert len(told["nothing"]) == 16
    assert told[case] == told["nothing"]


@pytest.mark.parametrize("case", ["load before the loop", "frozen and thawed"])
def test_what_the_job_can_do_has_its_effect(case: str) -> None:
    told = _told()
    assert len(told[case]) == 16
    assert told[case] != told["nothing"]


def test_a_rate_that_the_body_sets_before_its_batches_counts_in_that_step() -> None:
    assert _told()["a rate of 0 before the batches"] == "unmoved: True"


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("load after a step", "'entry.weight' was changed outside of the optimizer (in place)"),
        ("frozen teacher in place", "'teacher.weight' was changed outside of the optimizer (in place)"),
        ("frozen teacher through data", "'teacher.weight' was changed outside of the optimizer (through .data"),
        ("frozen teacher at the start", "job.register('teacher', module)"),
        ("frozen teacher within", "'teacher.weight' was changed"),
        ("clamped", "'tied.weight' was changed"),
        ("clamped after the backward", "'tied.weight' was changed"),
        ("another layer", "'entry.weight' was replaced"),
        ("a second backward", "'entry.weight' has a gradient from outside of step.backward"),
        ("a backward after it", "call step.backward(loss) once"),
        ("a backward between steps", "torch.autograd.grad"),
        ("thawed", "'teacher.weight' was frozen"),
        ("a group more", "call add_param_group before prepare"),
        ("optimizer.step", "Leave the call out"),
        ("optimizer.state_dict", "call it behind that loop"),
        ("optimizer.load_state_dict", "Call it before the loop"),
        ("a hook after prepare", "register_step_post_hook"),
        ("a hook before prepare", "register_step_post_hook"),
        ("an embedding with max_norm", "Embedding '1' has max_norm=1.0"),
    ],
)
def test_what_would_do_nothing_or_make_members_differ_is_refused_by_name(case: str, sentence: str) -> None:
    told = _told()[case]
    assert told.startswith("ConfigError: ")
    assert sentence in told


def test_behind_the_loop_and_after_an_exception_in_it_the_model_is_an_ordinary_one() -> None:
    found = {name: told for name, told in _told().items() if name.endswith(": the model")}
    assert len(found) > 20
    assert [name for name, told in found.items() if told != "True"] == []


def test_a_loop_that_is_left_after_a_change_behind_the_back_says_so_and_nothing_stands_still() -> None:
    assert "clamped, then the loop is left" in _told()
    told = [line for line in _done().stderr.splitlines() if line.startswith("elastrain: parameter")]
    assert len(told) == 1
    assert "'tied.weight' was changed outside of the optimizer" in told[0]
    assert "Exception ignored" not in _done().stderr
