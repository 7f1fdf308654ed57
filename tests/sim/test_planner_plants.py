"""Rules about plans, broken on purpose in the production cores: the simulator has to find each of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from elastrain.job.values import Record
from elastrain.member.commit_rules import Committing
from elastrain.member.pipeline.plan_fetch import PlanFetch
from elastrain.member.pipeline.proposals import Proposals
from elastrain.pipeline.planner import step_profile
from tests.sim.test_pipelined_members import plans_of

WITHIN = 40
"""Schedules that break a rule at the latest."""


def a_member_acts_on_its_own_measurements() -> AbstractContextManager[Any]:
    open_next = Committing.open_next

    def by_its_own(own: Committing, record: Record, *rest: Any) -> None:
        answer = own._machine.step.proposals._answer
        wish = None if answer is None or answer.answer is None else answer.answer.plan
        open_next(own, record if wish is None else replace(record, plan=wish), *rest)

    return patch.object(Committing, "open_next", by_its_own)


def a_proposal_for_another_view_counts() -> AbstractContextManager[Any]:
    stays = {
        "_is_about_now": lambda own, event: True,
        "forget_view": lambda own: own.measures.forget_view(own._views.newest.ids),
    }
    return patch.multiple(Proposals, **stays)


def a_member_that_lacks_the_plan_does_not_ask() -> AbstractContextManager[Any]:
    return patch.object(PlanFetch, "has_plan", lambda own: True)


def the_plan_is_asked_for_once_and_for_all() -> AbstractContextManager[Any]:
    return patch.object(PlanFetch, "forget_view", lambda own: None)


PLANTS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    a_member_acts_on_its_own_measurements,
    a_proposal_for_another_view_counts,
    a_member_that_lacks_the_plan_does_not_ask,
    the_plan_is_asked_for_once_and_for_all,
)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_broken_rule_is_found(
    plant: Callable[[], AbstractContextManager[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_profile, "WINDOW", 1)
    for seed in range(30_000, 30_000 + WITHIN):
        cluster = plans_of(seed, crashes=3, joins=2, backups=2)
        try:
            with plant():
                cluster.run(limit=6_000)
        except (AssertionError, KeyError, IndexError, StopIteration, ValueError):
            return
    pytest.fail(f"nothing found in {WITHIN} schedules")
