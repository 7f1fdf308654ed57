"""Moves of blocks by shadows: deaths at every step of a move, and the rules broken on purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest

from elastrain.member.pipeline import shadow_feed
from elastrain.member.pipeline.shadow_feed import ShadowFeed
from elastrain.member.state.ballot import Ballot
from elastrain.member.state.committed import Parameters
from elastrain.pipeline.moves import TRIES
from elastrain.pipeline.planner import step_profile
from tests.sim.test_pipelined_members import plans_of

WITHIN = 60
"""Schedules that break a rule at the latest."""
PIECE_BYTES = 5
"""The shards have 8 to 13 bytes: two or three pieces each."""


@pytest.fixture(autouse=True)
def _many_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "WINDOW", 1)
    monkeypatch.setattr(shadow_feed, "PIECE_BYTES", PIECE_BYTES)


@pytest.mark.parametrize("chunk", range(2))
def test_whoever_dies_at_any_step_of_a_move_the_digest_stays(chunk: int) -> None:
    ends = Counter[str]()
    for seed in range(70_000 + 30 * chunk, 70_000 + 30 * (chunk + 1)):
        cluster = plans_of(seed, crashes=seed % 4, joins=seed % 3, backups=2, slow=0.3)
        cluster.run()
        for move in cluster.checks.moves.values():
            assert move.step <= move.named + TRIES or move.is_dropped
            ends["dropped" if move.is_dropped else "ready" if move.step < move.named + TRIES else "waited"] += 1
    assert min(ends[each] for each in ("dropped", "ready", "waited")) >= 3


def a_shadow_counts_before_it_holds_the_parameters() -> AbstractContextManager[Any]:
    return patch.object(ShadowFeed, "is_ready", lambda own: bool(own._replicas.shadowed(own._views.me)))


def a_shadow_counts_with_parameters_of_an_older_step() -> AbstractContextManager[Any]:
    """Pieces of an older step stay read, and the replicas of a new plan compute with them."""
    return patch.object(ShadowFeed, "begin", lambda own, step: own._due.clear())


def a_shadow_computes_with_what_it_was_fed() -> AbstractContextManager[Any]:
    """A replica that was a shadow does not wait for the publish of the record that has made it one."""
    on_piece, need = ShadowFeed.on_piece, Parameters.need

    def keeps(own: ShadowFeed, message: Any, payload: object) -> None:
        on_piece(own, message, payload)
        own._commit.parameters.fed = {*getattr(own._commit.parameters, "fed", ()), message.shard}  # type: ignore[attr-defined]

    def without(own: Parameters, shards: Any) -> None:
        need(own, [shard for shard in shards if shard not in getattr(own, "fed", ())])

    planted = ExitStack()
    planted.enter_context(patch.object(ShadowFeed, "on_piece", keeps))
    planted.enter_context(patch.object(Parameters, "need", without))
    return planted


def members_wait_for_shadows() -> AbstractContextManager[Any]:
    def until_ready(own: ShadowFeed) -> str:
        return "" if not own._replicas.shadow_shards(own._views.me) or own.is_ready() else "a shadow is not ready"

    return patch.object(ShadowFeed, "why_not_yet", until_ready)


def a_shadow_reads_on_when_it_has_voted() -> AbstractContextManager[Any]:
    on_piece = ShadowFeed.on_piece

    def reads(own: ShadowFeed, message: Any, payload: object) -> None:
        with patch.object(Ballot, "has_voted", PropertyMock(return_value=False), create=True):
            ballot, own._ballot = own._ballot, Ballot.__new__(Ballot)
            on_piece(own, message, payload)
            own._ballot = ballot

    return patch.object(ShadowFeed, "on_piece", reads)


PLANTS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    a_shadow_counts_before_it_holds_the_parameters,
    a_shadow_counts_with_parameters_of_an_older_step,
    a_shadow_computes_with_what_it_was_fed,
    members_wait_for_shadows,
    a_shadow_reads_on_when_it_has_voted,
)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_broken_rule_is_found(plant: Callable[[], AbstractContextManager[Any]]) -> None:
    for seed in range(70_000, 70_000 + WITHIN):
        cluster = plans_of(seed, crashes=seed % 4, joins=seed % 3, backups=2, slow=0.3)
        try:
            with plant():
                cluster.run(limit=6_000)
        except (AssertionError, KeyError, IndexError, StopIteration, ValueError):
            return
    pytest.fail(f"nothing found in {WITHIN} schedules")
