"""Random forwards over random cuts: the gradients of one process, bit for bit, or a sentence."""

from __future__ import annotations

import random
import re

import pytest

from elastrain.errors import ConfigError
from tests.support.pipeline_models import Case, ragged
from tests.support.pipeline_steps import MICRO_BATCHES, alone, chain, in_pipelines
from tests.support.random_flows import RandomFlow

SEEDS = range(12)
EQUAL_AT_LEAST = 10


def outcome(seed: int) -> str:
    """`equal`, `other bits`, or why it is refused."""
    draw = random.Random(seed)
    collate, autocast = ragged if draw.random() < 0.25 else None, draw.choice(["", "", "forward", "loop"])
    case = Case(lambda: RandomFlow(seed), (1, 2), autocast, collate)
    expected = alone(case, 1).found
    blocks = len(RandomFlow(seed).layers) + 2
    legal = range(1, blocks)
    for _ in range(2):
        cuts = tuple(sorted(draw.sample(legal, min(len(legal), draw.randint(1, 2)))))
        members = ("a", "b", "c")[: len(cuts) + 1]
        try:
            found = in_pipelines(case, chain(members, cuts, MICRO_BATCHES), members, 1).found
        except ConfigError as error:
            named = re.search(r"legal cuts are \(0, ([0-9, ]+), \d+\)", str(error))
            if named is None:
                return str(error)
            legal = [int(cut) for cut in named[1].split(",")]  # type: ignore[assignment]
        else:
            return "equal" if found == expected else "other bits"
    raise AssertionError(f"seed {seed}: among cuts that are said to be legal one is not")


@pytest.mark.slow
def test_random_forwards_over_pipelines_make_the_bits_of_one_process() -> None:
    outcomes = {seed: outcome(seed) for seed in SEEDS}
    assert "other bits" not in outcomes.values(), outcomes
    assert list(outcomes.values()).count("equal") >= EQUAL_AT_LEAST, outcomes
