"""A member fetches the whole optimizer state between two steps, while others crash, join, and compute on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from elastrain.member.shards.state_fetch import StateFetch
from elastrain.protocol.messages import FetchedShard
from tests.sim.cluster import Cluster, Scenario, truth_of
from tests.sim.member import Violation

SEEDS = range(120)


def scenario_of(seed: int) -> Scenario:
    rng = random.Random(seed)
    return Scenario(
        members=rng.randint(1, 4),
        steps=rng.randint(2, 4),
        runs=rng.randint(1, 4),
        backups=rng.randint(1, 2),
        crashes=rng.randint(0, 2),
        joins=rng.randint(0, 2),
        zombies=rng.randint(0, 1),
        fetches=rng.choice((0.3, 1.0)),
        slow=rng.choice((0.0, 0.3)),
        budget_bytes=rng.choice((10, 1 << 20)),
    )


def play(seed: int) -> Cluster:
    scenario = scenario_of(seed)
    undisturbed = replace(scenario, fetches=0.0)
    cluster = Cluster(scenario, seed, truth_of(undisturbed))
    cluster.run()
    return cluster


def play_all() -> list[str]:
    return [play(seed).outcome for seed in SEEDS]


def test_every_fetch_brings_the_states_of_the_committed_step_and_nobody_stands_still() -> None:
    outcomes = play_all()
    assert outcomes.count("ok") >= 0.7 * len(SEEDS)


def answers_with_what_it_has(self: StateFetch) -> bool:
    """A holder that does not look which step its state is of."""
    due, self._questions = [each for each in self._questions if each[1].shard in self._holdings], []
    for source, asked in due:
        digest = self._holdings[asked.shard].digest
        self._out.send(source, FetchedShard(step=asked.step, shard=asked.shard, digest=digest))
    return bool(due)


def keeps_what_it_asked_in_the_last_view(self: StateFetch) -> None:
    """A member that does not ask again in a new view, where the holder that it asked may be gone."""
    self._questions.clear()


@pytest.mark.parametrize(
    ("method", "bug"),
    [("_answer", answers_with_what_it_has), ("forget_view", keeps_what_it_asked_in_the_last_view)],
)
def test_planted_bugs_are_found(method: str, bug: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateFetch, method, bug)
    with pytest.raises((Violation, KeyError)):  # KeyError: it has no state yet
        play_all()
