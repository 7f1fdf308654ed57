"""Who computes which micro-batch twice, and what is said where the two differ."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from elastrain.integrity.checks import Due, difference, neighbour, probes
from elastrain.job.values import Check

RUNS = {"a": (0, 1), "b": (2, 3), "c": (4,), "d": ()}
CHECK = Check(micro_batch=4, loss=0.5, weight=2.0, digests=(1, 2, 3, 4, 5))
BLOCKS = ("stem", "layers.0", "layers.1", "layers.2", "")


@pytest.mark.parametrize(("every", "steps"), [(0, [0]), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (9, [0])])
def test_members_check_each_other_in_the_first_step_and_in_every_nth(every: int, steps: list[int]) -> None:
    assert [step for step in range(5) if Due(0, every).is_in(step)] == steps


def test_in_a_resumed_job_they_check_each_other_in_its_first_step_too() -> None:
    assert [step for step in range(7, 12) if Due(7, 5).is_in(step)] == [7, 10]


def test_a_probe_is_the_last_run_of_each_who_has_runs() -> None:
    assert probes(RUNS) == {"a": 1, "b": 3, "c": 4}


@pytest.mark.parametrize("runs_each", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("circle", [2, 3, 4, 6])
def test_who_computes_a_probe_again_has_counted_on_since_however_small_the_circle(runs_each: int, circle: int) -> None:
    """Of the first run it had counted a whole share more: four of each, in circles of two, were no difference."""
    runs = {name: tuple(range(at * runs_each, (at + 1) * runs_each)) for at, name in enumerate("abc")}
    for owner, probe in probes(runs).items():
        assert runs[owner].index(probe) % circle != runs_each % circle


@pytest.mark.parametrize(("me", "checks"), [("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")])
def test_each_checks_the_next_one_in_a_ring_that_has_a_probe(me: str, checks: str) -> None:
    assert neighbour(me, tuple(RUNS), probes(RUNS)) == checks


def test_nobody_checks_himself() -> None:
    assert neighbour("a", ("a",), {"a": 0}) is None
    assert neighbour("a", ("a", "b"), {"a": 0}) is None
    assert neighbour("b", ("a", "b"), {"a": 0}) == "a"


def test_newcomers_are_checked_against_those_who_were_there_before_and_nobody_else_has_work() -> None:
    assert probes(RUNS, ()) == {}
    assert probes(RUNS, ("c",)) == {"a": 1}
    assert probes(RUNS, ("b", "c")) == {"a": 1}
    assert probes({"new": (0,), "old": ()}, ("new",)) == {}


def test_equal_results_are_no_difference_and_a_nan_equals_a_nan() -> None:
    told = {"a": [CHECK], "b": [replace(CHECK, micro_batch=0)], "c": [CHECK, replace(CHECK, micro_batch=0)]}
    assert difference(3, told, BLOCKS) == ""
    broken = replace(CHECK, loss=math.nan)
    assert difference(3, {"a": [broken], "b": [replace(CHECK, loss=float("nan"))]}, BLOCKS) == ""


def test_what_only_one_member_has_computed_is_compared_with_nothing() -> None:
    assert difference(3, {"a": [CHECK], "b": [replace(CHECK, micro_batch=5, digests=(0,))], "c": []}, BLOCKS) == ""


def test_the_sentence_names_members_micro_batch_step_and_blocks() -> None:
    other = replace(CHECK, digests=(1, 9, 9, 9, 9))
    sentence = difference(3, {"a": [CHECK], "b": [], "c": [other]}, BLOCKS)
    assert sentence.startswith(
        "micro-batch 4 of step 3 came out differently on a and c (gradients of 4 of 5 blocks: 'layers.0', 'layers.1', "
        "'layers.2' and 1 more): "
    )
    for cause in ("generator", "counter", "PYTHONHASHSEED", "processor", "thread"):
        assert cause in sentence


def test_a_loss_that_differs_is_told_with_both_values() -> None:
    sentence = difference(0, {"a": [CHECK], "b": [replace(CHECK, loss=0.25, weight=1.0)]}, BLOCKS)
    assert "on a and b (loss 0.5 against 0.25; weight 2.0 against 1.0): " in sentence


def test_every_pair_that_differs_is_named_so_that_the_odd_one_shows() -> None:
    first = replace(CHECK, micro_batch=0)
    told = {"a": [first], "b": [CHECK, replace(first, loss=9.0)], "c": [replace(CHECK, loss=8.0), first]}
    sentence = difference(0, told, BLOCKS)
    assert "on a and b (loss 0.5 against 9.0), micro-batch 4 on b and c: " in sentence


def test_blocks_without_a_name_have_a_number() -> None:
    sentence = difference(0, {"a": [CHECK], "b": [replace(CHECK, digests=(1, 2, 3, 4, 0))]}, BLOCKS)
    assert "gradients of 1 of 5 blocks: block 4" in sentence


def test_a_figure_that_differs_is_named_with_the_call_that_it_came_from() -> None:
    one, other = replace(CHECK, sums=(("right", 3.0),)), replace(CHECK, sums=(("right", 4.0), ("seconds", 0.5)))
    said = difference(3, {"a": [one], "b": [other]}, BLOCKS)
    assert "(step.add('right', …) 3.0 against 4.0; step.add('seconds', …) None against 0.5)" in said
