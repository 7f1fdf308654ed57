"""Real processes that hold some blocks each, under an unchanged loop in 1F1B order: the gradients are one worker's."""

from __future__ import annotations

import pytest

from tests.support.pipeline_members import MICRO_BATCHES, in_processes
from tests.support.pipeline_models import CASES

# The others by `-m on_demand`; within one process `tests/unit/pipeline/test_stubs.py` has all of them.
USUAL = ("gpt", "checkpointed", "autocast-loop", "passing-by")


@pytest.mark.parametrize(
    "case", [case if case in USUAL else pytest.param(case, marks=pytest.mark.on_demand) for case in CASES]
)
def test_three_members_make_the_gradients_of_one(case: str) -> None:
    alone, members = in_processes(case, 3)
    assert_equal(alone, members)


def test_two_members_make_the_gradients_of_one() -> None:
    alone, members = in_processes("encoder-decoder", 2)
    assert_equal(alone, members)


def assert_equal(alone, members) -> None:  # type: ignore[no-untyped-def]  # pytest shows them
    found = {key: value for member in members for key, value in member.gradients.items()}
    assert sum(len(member.gradients) for member in members) == len(found), "each parameter has one member"
    assert len({micro_batch for micro_batch, _ in found}) == MICRO_BATCHES
    assert found == alone.gradients
    assert members[-1].losses == alone.losses
