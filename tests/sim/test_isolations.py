"""Whole jobs in which nodes are out of reach for long, and the store loses its data meanwhile.

`ELASTRAIN_SIM_ISOLATIONS` is how many are played: 100 take some ten seconds.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.sim.job.isolation_plants import PLANTS
from tests.sim.job.isolation_schedules import draw_isolations
from tests.sim.job.shrink import failure_of

SCHEDULES = int(os.environ.get("ELASTRAIN_SIM_ISOLATIONS", "100"))


def test_a_job_whose_nodes_are_out_of_reach_goes_on_or_ends_and_never_begins_again() -> None:
    kinds = Counter(type(fault).__name__ for seed in range(SCHEDULES) for fault in draw_isolations(seed).faults)
    assert kinds["Isolate"] >= 0.5 * SCHEDULES and kinds["Wipe"] >= 0.3 * SCHEDULES, kinds
    broken = {seed: failure for seed in range(SCHEDULES) if (failure := failure_of(draw_isolations(seed)))}
    assert broken == {}


@pytest.mark.parametrize("name", sorted(PLANTS))
def test_a_planted_bug_is_found(name: str) -> None:
    assert PLANTS[name].search.find() is not None, PLANTS[name].rule
