"""Nodes agree upon a job's lives over a store that answers late, twice, or not: every interleaving that a seed draws.

A node's part is production's: `enrol`'s look at the life that stands, `JobKeys`, `agree`. What a life does is drawn:
which nodes are in it, who hears of its end, how far its newest checkpoint goes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from elastrain.base.environment import scope
from elastrain.launcher.shared.job_values import End, Life, NodeRecord, Roster
from elastrain.launcher.start import restarts
from elastrain.launcher.start.restarts import BARREN_MAX, LifeEnd, agree
from elastrain.launcher.store.job_keys import JobKeys
from elastrain.launcher.store.life_keys import life_key, read_life
from elastrain.launcher.store.port import MemoryStore, StoreUnavailableError
from elastrain.launcher.store.sealed import SealedStore

SEEDS = 300
_TTL_S = 3600.0
LOST = End(code=1, sentence="the state is gone", lost=True)
ALONE = End(code=1, sentence="the job has ended while this node could not be reached", everywhere=False)


class ViolationError(AssertionError):
    """Something does not hold."""


class Shaky(MemoryStore):
    """Between a node's look and its transaction others may act; an answer may be lost after it was carried out."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(lambda: 0.0)
        self._rng = rng
        self.others: list[Callable[[], None]] = []

    def commit(self, **transaction: Any) -> int | None:  # type: ignore[override]
        while self.others and self._rng.random() < 0.3:
            self.others.pop(self._rng.randrange(len(self.others)))()
        if self._rng.random() < 0.05:
            raise StoreUnavailableError("it was not reached")
        revision = super().commit(**transaction)
        if self._rng.random() < 0.05:
            raise StoreUnavailableError("the answer was lost")
        return revision


class Nodes:
    """Some nodes through several lives."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"lives {seed}")
        self._memory = Shaky(self._rng)
        self._store = SealedStore(self._memory, b"s" * 32)
        self.used: set[int] = set()
        self.begun: dict[int, Life] = {1: Life()}
        self._checkpoint: int | None = None

    def play(self) -> None:
        life, names = Life(), [f"n{index}" for index in range(self._rng.randrange(1, 5))]
        for _ in range(self._rng.randrange(1, 7)):
            members = self._live(life, names)
            if self._rng.random() < 0.7:
                self._checkpoint = (-1 if self._checkpoint is None else self._checkpoint) + self._rng.randrange(1, 4)
            following = self._lose(life, names, members)
            if following is None:
                return
            life = following

    def _live(self, life: Life, names: list[str]) -> int:
        """The roster's workers, and some that come later; the first number that an agent knows to be unused."""
        records = tuple(NodeRecord(name=name, incarnation=1, workers=2) for name in names)
        roster = Roster(nodes=records, first_member=life.first_member)
        keys = JobKeys(self._store, scope("j", life.number), _TTL_S)
        self._again(lambda: keys.put_roster(roster))
        numbers = list(range(roster.first_member, roster.first_member + roster.workers))
        numbers += [self._again(lambda: keys.take_member(at_least=0)) for _ in range(self._rng.randrange(3))]
        if self.used & set(numbers):
            raise ViolationError(f"numbers {sorted(self.used & set(numbers))} are used in two lives")
        self.used |= set(numbers)
        return roster.first_member + roster.workers

    def _lose(self, life: Life, names: list[str], first_member: int) -> Life | None:
        """Each node comes to its end in its own time; some have not heard how, and some were killed and come back."""
        found: dict[str, Life | None] = {}
        heard = self._rng.sample(names, self._rng.randrange(1, len(names) + 1))

        def come(name: str) -> None:
            end = LOST if name in heard else ALONE
            ended = LifeEnd(life=life, end=end, first_member=first_member)
            newest = self._newest()
            found[name] = self._again(lambda: agree(self._store, "j", _TTL_S, ended, newest)).life

        # Those who know of the loss are first: the others learn of the next life from the store.
        for name in heard:
            self._memory.others.append(lambda name=name: come(name))  # type: ignore[misc]
        self._run_all()
        for name in [name for name in names if name not in heard]:
            come(name)
        return self._judge(life, found)

    def _newest(self) -> int | None:
        """As a node finds it: one more may have become complete since the job lost its state."""
        return None if self._checkpoint is None else self._checkpoint + self._rng.randrange(2)

    def _run_all(self) -> None:
        while self._memory.others:
            self._memory.others.pop(0)()

    def _judge(self, life: Life, found: dict[str, Life | None]) -> Life | None:
        stands = self._again(lambda: read_life(self._store, "j"))[1]
        there = {each for each in found.values() if each is not None}
        if len(there) > 1:
            raise ViolationError(f"nodes go on in {there}")
        if self._checkpoint is None or not there:
            if there:
                raise ViolationError("a life begins without a checkpoint")
            if self._checkpoint is not None and life.barren < BARREN_MAX - 1:
                raise ViolationError(f"no life follows upon {life}, though there is a checkpoint")
            return None
        [following] = there
        if None in found.values() or following != stands:
            raise ViolationError(f"not all nodes go on in {stands}: {found}")
        if following.number != life.number + 1:
            raise ViolationError(f"life {following.number} follows upon {life.number}")
        if following.step < self._checkpoint:
            raise ViolationError(f"life {following.number} loses the checkpoint of step {self._checkpoint}")
        self.begun[following.number] = following
        return following

    def _again(self, call: Callable[[], Any]) -> Any:
        """As its callers do: until the store answers."""
        while True:
            try:
                return call()
            except StoreUnavailableError:
                continue


def _play_all() -> int:
    """How many lives there were."""
    every = [Nodes(seed) for seed in range(SEEDS)]
    for nodes in every:
        nodes.play()
    return sum(len(nodes.begun) for nodes in every)


def test_all_nodes_go_on_in_one_life_that_loses_no_checkpoint_and_uses_no_number_twice() -> None:
    assert _play_all() > 2 * SEEDS


# ---- planted: each breaks one rule


@contextmanager
def the_last_one_wins() -> Iterator[None]:
    """A life is begun by a transaction: whoever comes second takes the first one's."""

    def begin(store: Any, job: str, life: Life, lease: int | None, counted: Any) -> Life:
        there, _ = read_life(store, job)
        encoded = msgspec.json.encode(life)
        store.commit(expect={life_key(job): there}, put={life_key(job): encoded}, lease=lease)
        return life

    with patch.object(restarts, "begin_life", begin):
        yield


@contextmanager
def one_more_life_for_each_who_comes() -> Iterator[None]:
    """Who comes late to the end of a life goes on in the one that another has begun."""
    real = restarts.agree

    def late(store: Any, job: str, ttl_s: float, ended: LifeEnd, newest_step: int | None) -> Any:
        stands = read_life(store, job)[1]
        return real(store, job, ttl_s, LifeEnd(life=stands, end=ended.end, first_member=0), newest_step)

    with patch(f"{__name__}.agree", late):
        yield


@contextmanager
def numbers_by_what_the_agent_knows() -> Iterator[None]:
    """The counter in the store knows of members that this agent has never heard of."""
    real = restarts._counted
    with patch.object(restarts, "_counted", lambda store, counter: (0, real(store, counter)[1])):
        yield


@contextmanager
def keys_go_with_their_life() -> Iterator[None]:
    """The keys of the job itself stay for its next life."""
    real = JobKeys.remove_all

    def remove(self: JobKeys, *args: Any) -> bool:
        self._store.commit(expect={}, delete=[life_key("j")])
        return real(self, *args)

    with patch.object(JobKeys, "remove_all", remove):
        yield


@pytest.mark.parametrize(
    "plant",
    [
        the_last_one_wins,
        one_more_life_for_each_who_comes,
        numbers_by_what_the_agent_knows,
        keys_go_with_their_life,
    ],
)
def test_a_planted_bug_is_found(plant: Callable[[], Any]) -> None:
    with plant(), pytest.raises(ViolationError):
        _play_all()
