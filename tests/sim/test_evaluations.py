"""Members evaluate together between two steps, while others crash, sleep, join, and find wrong parameters."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest

from elastrain.decisions.batch_shares import Shares
from elastrain.job.figures import FigureSum, read
from elastrain.member.evaluations import Evaluations
from elastrain.member.own_batches import OwnEvaluation
from elastrain.member.pipeline.replicas import Replicas
from elastrain.protocol.evaluation_messages import (
    BatchFigures,
    EvaluateBatches,
    EvaluationName,
    EvaluationResult,
    InEvaluation,
)
from elastrain.protocol.messages import LoopHandover
from tests.sim.cluster import Cluster, Scenario, truth_of
from tests.sim.evaluating import EvaluatingScript
from tests.sim.member import Violation

SEEDS = range(120)


def scenario_of(seed: int, broadcasts: float = 0.0) -> Scenario:
    rng = random.Random(seed)
    if seed % 10 == 0:
        return Scenario(
            members=rng.randint(2, 4), flips=1, joins=rng.randint(0, 2), evaluations=3, broadcasts=broadcasts
        )
    return Scenario(
        members=rng.randint(1, 4),
        steps=rng.randint(2, 4),
        runs=rng.randint(1, 4),
        backups=rng.randint(1, 2),
        crashes=rng.randint(0, 3),
        joins=rng.randint(0, 2),
        zombies=rng.randint(0, 1),
        noisy=rng.random() < 0.3,
        evaluations=rng.randint(1, 3),
        fetches=rng.choice((0.0, 0.3)),
        slow=rng.choice((0.0, 0.3)),
        early=rng.random() < 0.3,
        budget_bytes=rng.choice((10, 1 << 20)),
        broadcasts=broadcasts,
    )


class Trapped(Cluster):
    """A job in which members die of sending a message of an evaluation: the others get it, or some of them."""

    def _hit(self, kind: str) -> None:
        if kind == "crash" and not self.finished and len(self._living()) > 1:
            self.struck += 1
            self.trap.append(self.rng.choice(DEATHS))
        else:
            super()._hit(kind)


DEATHS = (EvaluationResult, EvaluationResult, BatchFigures, EvaluateBatches, InEvaluation, LoopHandover, LoopHandover)


def play(seed: int, broadcasts: float = 0.0) -> Cluster:
    scenario = scenario_of(seed, broadcasts)
    truth = None if scenario.noisy else truth_of(replace(scenario, evaluations=0))
    cluster = (Trapped if seed % 3 else Cluster)(scenario, seed, truth)
    cluster.run()
    return cluster


def play_all(broadcasts: float = 0.0) -> list[str]:
    return [play(seed, broadcasts).outcome for seed in SEEDS]


def test_every_evaluation_comes_to_the_sum_in_the_order_of_the_batches_and_nobody_stands_still() -> None:
    outcomes = play_all()
    assert outcomes.count("ok") >= 0.7 * len(SEEDS)


@pytest.mark.parametrize("part", [0.5, 1.0])
def test_every_broadcast_gives_all_members_the_value_of_one_and_nobody_stands_still(part: float) -> None:
    outcomes = play_all(broadcasts=part)
    assert outcomes.count("ok") >= 0.7 * len(SEEDS)


def adds_in_the_order_in_which_they_come(self: FigureSum, batch: int, text: str) -> None:
    """A sum whose bits depend on which member was faster."""
    if not self.has(batch):
        _fold(self, batch, text)


def counts_what_comes_twice(self: FigureSum, batch: int, text: str) -> None:
    """A batch that two members have computed counts twice."""
    _fold(self, batch, text)


def _fold(self: FigureSum, batch: int, text: str) -> None:
    figures = read(text)
    self.total = {name: self.total[name] + figures[name] for name in figures} if self.total else figures
    self._later[batch] = text
    if len(self._later) == self.batches:
        self._folded = self.batches


def loses_batches_with_their_member(self: Shares) -> None:
    """Batches that a lost member was to compute are handed out to no member."""
    self.come.clear()


def does_not_wait_for_those_with_a_result(
    self: Shares, members: Collection[str], rule: Callable[..., Any] = Shares.result
) -> Any:
    """A new collector makes a second result, although a member has the first one."""
    return rule(self, ())


def forgets_what_it_has_told(self: Evaluations, source: str, name: EvaluationName) -> bool:
    """A member that has the result does not answer the one that still needs it."""
    return False


def announces_once(self: OwnEvaluation) -> None:
    """A new collector does not hear who is in the evaluation."""
    self.pieces.clear()


@pytest.mark.parametrize(
    ("part", "method", "bug"),
    [
        (FigureSum, "add", adds_in_the_order_in_which_they_come),
        (FigureSum, "add", counts_what_comes_twice),
        (Shares, "begin_view", loses_batches_with_their_member),
        (Evaluations, "_answer", forgets_what_it_has_told),
        (OwnEvaluation, "begin_view", announces_once),
    ],
)
def test_planted_bugs_are_found(part: type, method: str, bug: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, method, bug)
    with pytest.raises(Violation):
        play_all()


def asks_whoever_is_there(self: Shares, rank: int, members: Sequence[str], voters: Collection[str]) -> tuple[str, ...]:
    """The first member that comes gives its value."""
    return tuple(self._given)[:1]


def asks_the_rank_only(self: Shares, rank: int, members: Sequence[str], voters: Collection[str]) -> tuple[str, ...]:
    """A value is waited for whose member is lost, or has begun behind the broadcast."""
    return tuple(members[rank : rank + 1])


@pytest.mark.parametrize(
    ("part", "method", "bug"),
    [
        (Shares, "giver", asks_whoever_is_there),
        (Shares, "giver", asks_the_rank_only),
        (Evaluations, "_answer", forgets_what_it_has_told),
        (OwnEvaluation, "begin_view", announces_once),
    ],
)
def test_planted_bugs_of_broadcasts_are_found(
    part: type, method: str, bug: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, method, bug)
    with pytest.raises(Violation):
        play_all(broadcasts=1.0)


def test_a_value_given_again_after_a_loss_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members have different values: the new collector asks anew, although a member has got the first value."""
    giver = Shares.giver
    monkeypatch.setattr(Shares, "giver", lambda self, rank, members, _: giver(self, rank, members, ()))
    monkeypatch.setattr(Shares, "result", does_not_wait_for_those_with_a_result)
    monkeypatch.setattr(EvaluatingScript, "_check_giver", lambda self, name, given: None)  # found before
    with pytest.raises(Violation, match="has come to something else on"):
        play_all(broadcasts=1.0)


def pipelined(seed: int) -> Cluster:
    """A job in pipelines that evaluates, of which members die while batches are on their way."""
    rng = random.Random(f"evaluates in pipelines {seed}")
    scenario = Scenario(
        members=rng.choice([2, 3, 4, 5]),
        steps=3,
        runs=rng.choice([1, 2, 3, 5]),
        run_length=rng.choice([1, 2]),
        stages=rng.choice([2, 2, 3, 4]),
        backups=rng.choice([1, 1, 2]),
        crashes=rng.choice([0, 1, 1, 2]),
        zombies=rng.choice([0, 0, 0, 1]),
        joins=rng.choice([0, 0, 1, 2]),
        slow=rng.choice([0.0, 0.0, 0.3]),
        evaluations=rng.randint(1, 3),
    )
    if seed % 10 == 0:
        scenario = replace(scenario, flips=1, crashes=0, zombies=0)
    alone = Scenario(steps=3, runs=scenario.runs, run_length=scenario.run_length, backups=scenario.backups)
    cluster = (Trapped if seed % 3 else Cluster)(scenario, seed, truth_of(alone))
    cluster.run()
    return cluster


def play_pipelined(seeds: int) -> list[str]:
    return [pipelined(seed).outcome for seed in range(seeds)]


def test_batches_that_go_through_pipelines_come_to_the_same_and_nobody_stands_still() -> None:
    outcomes = play_pipelined(len(SEEDS))
    assert outcomes.count("ok") >= 0.7 * len(SEEDS)


def drops_what_stages_below_still_read(self: OwnEvaluation, batches: object = None) -> tuple[Any, ...]:
    """Tensors that crossed a cut are freed with the next batches, and not once their figures are known."""
    gone = tuple(sorted(self.kept))
    self.kept.clear()
    return gone


def adopts_without_telling(self: Replicas, member: str, places: Collection[int]) -> tuple[int, ...]:
    """A member that lacks blocks gets no parameters of them."""
    return ()


@pytest.mark.parametrize(
    ("part", "method", "bug"),
    [
        (OwnEvaluation, "drop", drops_what_stages_below_still_read),
        (OwnEvaluation, "begin_view", announces_once),
        (Replicas, "adopt", adopts_without_telling),
    ],
)
def test_planted_bugs_of_pipelined_evaluations_are_found(
    part: type, method: str, bug: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, method, bug)
    with pytest.raises((Violation, KeyError)):
        play_pipelined(60)
