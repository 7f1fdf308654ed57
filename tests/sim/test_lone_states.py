"""The only member that is left looks at its states by itself: nobody else could tell that a bit has changed."""

from __future__ import annotations

import random
from collections import Counter
from unittest.mock import patch

import pytest

from elastrain.member.integrity.comparison import SoleCopies
from tests.sim.cluster import Cluster, Scenario, truth_of
from tests.sim.symbols import Violation

SEEDS = 30


def left_alone(seed: int) -> Cluster:
    """A job of two of which one dies; bits of what the other one has change then."""
    rng = random.Random(f"lone {seed}")
    runs = rng.choice([1, 3, 4])
    scenario = Scenario(members=2, steps=5, runs=runs, backups=1, crashes=1, lone=1, slow=rng.choice([0.0, 0.3]))
    return Cluster(scenario, seed, truth_of(Scenario(steps=5, runs=runs, backups=1)))


def ends(seeds: range) -> Counter[str]:
    """How the jobs end in which a bit has changed."""
    found: Counter[str] = Counter()
    for seed in seeds:
        cluster = left_alone(seed)
        try:
            cluster.run()
            how = cluster.outcome
        except Violation:
            how = "wrong"
        if cluster.flipped:
            found[how] += 1
    return found


def test_a_lone_member_whose_state_has_changed_ends_the_job_and_commits_nothing_wrong() -> None:
    found = ends(range(SEEDS))
    assert found["wrong"] == 0
    assert found["lost"] >= SEEDS // 4


@pytest.mark.parametrize("rule", ["note", "look_again"])
def test_without_one_of_its_two_looks_it_would_not(rule: str) -> None:
    with (
        patch.object(SoleCopies, rule, lambda *_: False),
        patch.object(SoleCopies, "why_not_yet", lambda _: ""),
    ):
        assert ends(range(SEEDS))["wrong"] > 0
