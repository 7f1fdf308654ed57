"""Moves of blocks by shadows: deaths at every step of a move, and the rules broken on purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest

from elastrain.buffers.shard_states import StateBooks
from elastrain.job import pieces
from elastrain.member.loop_stages import LoopStage, LoopStages
from elastrain.member.pipeline.moving_shards import MovingShards
from elastrain.member.pipeline.shadow_feed import ShadowFeed
from elastrain.member.shards.copies import CopiesGiven, CopiesTaken
from elastrain.member.state.ballot import Ballot
from elastrain.member.state.committed import Parameters
from elastrain.pipeline.moves import TRIES
from elastrain.pipeline.planner import step_profile
from tests.sim.cluster import Cluster
from tests.sim.symbols import Violation
from tests.sim.test_pipelined_members import plans_of

WITHIN = 60
"""Schedules that break a rule at the latest."""
STANDING = 90_000
"""The first seed of jobs with standing shadows."""
LATE = 80_005
"""The first seed of jobs without backups, in which copies to shadows are often read late."""
PIECE_BYTES = 5
"""The shards have 8 to 13 bytes: two or three pieces each."""


@pytest.fixture(autouse=True)
def _many_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "WINDOW", 1)
    monkeypatch.setattr(pieces, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(pieces, "STATE_PER_PARAMETER", 1)


@pytest.mark.parametrize("chunk", range(2))
def test_whoever_dies_at_any_step_of_a_move_the_digest_stays(chunk: int) -> None:
    ends = Counter[str]()
    handed = 0
    for seed in range(70_000 + 30 * chunk, 70_000 + 30 * (chunk + 1)):
        cluster = plans_of(seed, crashes=seed % 4, joins=seed % 3, backups=2, slow=0.3)
        cluster.run()
        for move in cluster.checks.moves.values():
            assert move.step <= move.named + TRIES or move.is_dropped
            ends["dropped" if move.is_dropped else "ready" if move.step < move.named + TRIES else "waited"] += 1
        handed += cluster.checks.handed
    assert handed >= 10, "shards go to new primaries without a publish"
    assert min(ends[each] for each in ("dropped", "ready", "waited")) >= 2


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


def a_taker_counts_before_it_has_acknowledged() -> AbstractContextManager[Any]:
    """A shard goes to a member that lacks its state, or the step's gradient."""
    plan_vote = MovingShards.vote

    def with_takers(own: MovingShards) -> Any:
        ballot, coming = own._machine.step.ballot, own._machine.commit.roles.coming
        acked = ballot.acknowledged
        with patch.object(ballot, "acknowledged", lambda shard: {*acked(shard), coming.get(shard, own._machine.me)}):
            return plan_vote(own)

    return patch.object(MovingShards, "vote", with_takers)


def a_taker_computes_with_the_state_before_its_update() -> AbstractContextManager[Any]:
    update_behind = StateBooks.update_behind

    def shown(own: StateBooks, tasks: Any, *, shows: bool = False) -> Any:
        if not shows:
            return update_behind(own, tasks)
        for task in tasks:
            own._arithmetic.show(own.states[task.shard])
        return []

    return patch.object(StateBooks, "update_behind", shown)


def members_wait_for_copies_to_shadows() -> AbstractContextManager[Any]:
    return patch.object(CopiesGiven, "_is_for_shadow", lambda *_: False)


PLANTS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    a_shadow_counts_before_it_holds_the_parameters,
    a_shadow_counts_with_parameters_of_an_older_step,
    a_shadow_computes_with_what_it_was_fed,
    members_wait_for_shadows,
    a_shadow_reads_on_when_it_has_voted,
    a_taker_counts_before_it_has_acknowledged,
    a_taker_computes_with_the_state_before_its_update,
    members_wait_for_copies_to_shadows,
)


RARE = {a_shadow_reads_on_when_it_has_voted: 70_360}
"""Bugs that few schedules show, and the seed from which on they are looked for. Most shards move as copies."""


@pytest.mark.parametrize("plant", PLANTS)
def test_a_broken_rule_is_found(plant: Callable[[], AbstractContextManager[Any]]) -> None:
    first = RARE.get(plant, 70_000)
    for seed in range(first, first + WITHIN):
        cluster = plans_of(seed, crashes=seed % 4, joins=seed % 3, backups=2, slow=0.3)
        try:
            with plant():
                cluster.run(limit=6_000)
        except (AssertionError, KeyError, IndexError, StopIteration, ValueError):
            return
    pytest.fail(f"nothing found in {WITHIN} schedules")


def a_shadow_takes_copies_when_it_has_voted() -> AbstractContextManager[Any]:
    """The giver may have gone on by then, and what the copy refers to has changed."""
    on_copy = CopiesTaken.on_copy

    def takes(own: CopiesTaken, *of: Any, **more: Any) -> None:
        with patch.object(own, "_ballot", Ballot()):
            on_copy(own, *of, **more)

    return patch.object(CopiesTaken, "on_copy", takes)


def a_copy_counts_that_was_read_after_its_givers_vote() -> AbstractContextManager[Any]:
    """Void copies count: their reader is sent the gradient then, which no member waits for."""
    on_copied = CopiesGiven.on_copied

    def counts(own: CopiesGiven, *of: Any, **more: Any) -> None:
        step = SimpleNamespace(ballot=Ballot(), reduction=own._step.reduction)
        with patch.object(own, "_step", step):
            on_copied(own, *of, **more)

    return patch.object(CopiesGiven, "on_copied", counts)


def _without_backups(seed: int) -> Cluster:
    return plans_of(seed, crashes=0, zombies=0, isolated=0, joins=3, backups=0, slow=0.3, nodes=2, checkpoint_every=1)


def test_shards_without_backups_move_too() -> None:
    handed = 0
    for seed in range(LATE, LATE + 10):
        cluster = _without_backups(seed)
        cluster.run()
        handed += cluster.checks.handed
    assert handed >= 5


@pytest.mark.parametrize(
    "plant", [a_copy_counts_that_was_read_after_its_givers_vote, a_shadow_takes_copies_when_it_has_voted]
)
def test_a_copy_that_comes_too_late_is_found(plant: Callable[[], AbstractContextManager[Any]]) -> None:
    def run_some() -> None:
        for seed in range(LATE, LATE + WITHIN):
            _without_backups(seed).run(limit=6_000)

    with plant(), pytest.raises(Violation):
        run_some()


def _standing(seed: int) -> Cluster:
    crashes = 1 + seed % 2
    return plans_of(seed, crashes=crashes, joins=seed % 2, zombies=0, isolated=0, backups=2, slow=0.3, standing=True)


@pytest.mark.parametrize("chunk", range(2))
def test_whoever_is_lost_its_blocks_go_to_standing_shadows_and_the_digest_stays(chunk: int) -> None:
    shown = 0
    for seed in range(STANDING + 20 * chunk, STANDING + 20 * (chunk + 1)):
        cluster = _standing(seed)
        cluster.run()
        shown += cluster.checks.shown
    assert shown >= 5, "shadows adopt blocks, and nothing is published to them"


def a_shadow_has_what_it_has_read_in_part() -> AbstractContextManager[Any]:
    on_piece = ShadowFeed.on_piece

    def has(own: ShadowFeed, message: Any, payload: object) -> None:
        on_piece(own, message, payload)
        if own._read[message.shard]:
            own._commit.parameters.have(message.shard)

    return patch.object(ShadowFeed, "on_piece", has)


def an_adopter_has_what_it_once_read() -> AbstractContextManager[Any]:
    """What a shadow has read of an older step counts for the committed one."""
    expect = Parameters.expect

    def keeps(own: Parameters, step: int) -> None:
        has = [shard for shard in range(len(own.versions)) if own.has(shard) and shard not in own.needed()]
        expect(own, step)
        for shard in has:
            own.have(shard)

    return patch.object(Parameters, "expect", keeps)


def a_member_votes_while_it_warms_up() -> AbstractContextManager[Any]:
    """A commit that drops a move frees the memory with which the loop computes."""
    why_not_yet = LoopStages.why_not_yet

    def votes(own: LoopStages) -> str:
        stage = LoopStage.WAITING if own.stage is LoopStage.WARMING else own.stage
        with patch.object(own, "stage", stage):
            return why_not_yet(own)

    return patch.object(LoopStages, "why_not_yet", votes)


@pytest.mark.parametrize(
    "plant", [a_shadow_has_what_it_has_read_in_part, an_adopter_has_what_it_once_read, a_member_votes_while_it_warms_up]
)
def test_a_broken_rule_of_standing_shadows_is_found(plant: Callable[[], AbstractContextManager[Any]]) -> None:
    for seed in range(STANDING, STANDING + WITHIN):
        cluster = _standing(seed)
        try:
            with plant():
                cluster.run(limit=6_000)
        except (AssertionError, KeyError, IndexError, StopIteration, ValueError):
            return
    pytest.fail(f"nothing found in {WITHIN} schedules")
