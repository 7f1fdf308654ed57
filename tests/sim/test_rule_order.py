"""The rules of a member's machine in other orders: every schedule ends as it does in the written order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest

from elastrain.member.commit_rules import Committing
from elastrain.member.custody_rules import CustodyRules
from elastrain.member.member_machine import MemberMachine
from tests.sim.member import Violation
from tests.sim.scenarios import cluster_of

Rules = Sequence[Callable[[], bool]]
SCHEDULES = 200
EARLY = 20
"""Schedules of the ordinary run."""


def _swapped(rules: Rules) -> Rules:
    """Compare parameters before the vote, and not after it."""
    parts = [type(rule.__self__) for rule in rules]  # type: ignore[attr-defined]  # each is a method of a part
    order = list(rules)
    first, second = parts.index(CustodyRules), parts.index(Committing)
    order[first], order[second] = order[second], order[first]
    return order


def _shuffled(seed: int) -> Callable[[Rules], Rules]:
    rng = random.Random(seed)
    return lambda rules: rng.sample(rules, len(rules))


ORDERS: dict[str, Callable[[Rules], Rules]] = {
    "reversed": lambda rules: rules[::-1],
    "compare before vote": _swapped,
    **{f"shuffled in every round, generator {seed}": _shuffled(seed) for seed in range(3)},
}


@cache
def _expected(seed: int) -> tuple[str, dict[int, Any]]:
    return _end(seed)


def _end(seed: int) -> tuple[str, dict[int, Any]]:
    """Outcome of the schedule, and the digest after each step."""
    cluster = cluster_of(seed)
    cluster.run()
    return cluster.outcome, dict(sorted(cluster.seen.digests.items()))


def _differences(seeds: range, order: Callable[[Rules], Rules]) -> list[int]:
    """Seeds of schedules that end otherwise than in the written order. Raises Violation where one stands still."""
    written = MemberMachine._rules
    expected = {seed: _expected(seed) for seed in seeds}
    with patch.object(MemberMachine, "_rules", lambda core: order(written(core))):
        return [seed for seed in seeds if _end(seed) != expected[seed]]


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_the_rules_does_not_matter(order: str) -> None:
    assert _differences(range(EARLY), ORDERS[order]) == []


@pytest.mark.on_demand
@pytest.mark.timeout(0)
@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_the_rules_does_not_matter_in_many_schedules(order: str) -> None:
    assert _differences(range(EARLY, SCHEDULES), ORDERS[order]) == []


def test_a_rule_that_does_not_report_its_change_is_found() -> None:
    vote = Committing.vote

    def silent(committing: Committing) -> bool:
        vote(committing)
        return False

    with patch.object(Committing, "vote", silent), pytest.raises(Violation, match=r"stuck|stand"):
        _differences(range(EARLY), list)
