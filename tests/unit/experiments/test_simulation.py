"""What the hunt adds up: schedules, faults, and a sentence for each seed that breaks an invariant."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from experiments.simulation import run
from tests.sim.cluster import Cluster
from tests.sim.symbols import Violation


def test_pieces_are_added_up_until_the_time_is_over() -> None:
    pieces = [(Counter(schedules=50, faults=9, ok=50), ["seed 3: Violation: a bit"]), (Counter(schedules=50), [])]
    assert run.hunt(iter(pieces), math.inf) == (Counter(schedules=100, faults=9, ok=50), ["seed 3: Violation: a bit"])
    assert run.hunt(iter(pieces), 0.0)[0]["schedules"] == 50


def test_a_schedule_that_breaks_an_invariant_is_named_by_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(cluster: Cluster) -> None:
        raise Violation("a bit")

    monkeypatch.setattr(Cluster, "run", breaks)
    monkeypatch.setattr(run, "cluster_of", lambda seed: Cluster.__new__(Cluster))
    monkeypatch.setattr(Cluster, "struck", 0, raising=False)
    ended, broken = run.simulate(100)
    assert ended["schedules"] == len(broken) == run.PIECE
    assert broken[7] == "seed 107: Violation: a bit"
