"""Lives of a job: the decision whether another life follows one that lost its state, and the agreement on it.

A life is the job from one start of all workers to their end. The first begins as the command says. Each later one
continues from a durable checkpoint, with its own roster and keys. `next_life` is pure; `SharedLives` and `agree` make
blocking calls to the store, while this node has no workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

import msgspec

from elastrain.base.environment import scope
from elastrain.launcher.shared.console import say
from elastrain.launcher.shared.job_values import End, Life
from elastrain.launcher.shared.rundir import EventLog
from elastrain.launcher.store.job_keys import JobKeys
from elastrain.launcher.store.life_keys import begin_life, read_life
from elastrain.launcher.store.port import Store, StoreUnavailableError
from elastrain.launcher.store.sealed import SealedStore

BARREN_MAX = 3
"""Number of lives in a row that may end without a newer checkpoint than the one they began with."""


@dataclass(frozen=True, kw_only=True)
class Following:
    """Decision after a life: the next life, or None if the job ends; and the reason, for the screen and event log."""

    life: Life | None
    reason: str


def next_life(life: Life, end: End, *, newest_step: int | None, first_member: int) -> Following:
    """Decide whether another life follows `life`, which has ended with `end`.

    Args:
        life: the life that has ended.
        end: its end.
        newest_step: step of the newest complete checkpoint, or None if there is none.
        first_member: the first member number that no life has used.
    """
    first_member = max(first_member, life.first_member)
    if end.again:
        later = replace(life, number=life.number + 1, restarts=life.restarts + 1, first_member=first_member)
        return Following(life=later, reason=f"life {later.number} begins, with new workers")
    if not end.lost:
        return Following(life=None, reason="the job has not lost its state")
    if newest_step is None:
        return Following(life=None, reason="there is no complete checkpoint to go back to yet")
    # A cause that ends every life before its first checkpoint, such as a bug in the script, would end all later lives.
    barren = life.barren + 1 if life.number > 1 and newest_step <= life.step else 0
    if barren >= BARREN_MAX:
        return Following(life=None, reason=_why_no_more(newest_step))
    later = replace(life, number=life.number + 1, step=newest_step, barren=barren, first_member=first_member)
    return Following(life=later, reason=f"life {later.number} begins, and reads the checkpoint of step {newest_step}")


def _why_no_more(step: int) -> str:
    return (
        f"{BARREN_MAX} lives in a row came no further than the checkpoint of step {step}: look at what ended them "
        "before you start the job again"
    )


def last_end(end: End, following: Following) -> End:
    """Return the end of the job. Adds the reason if no life follows one that has lost its state."""
    if following.life is not None or not end.lost:
        return end
    return msgspec.structs.replace(end, sentence=f"{end.sentence}; {following.reason}")


_ASK_AGAIN_S = 0.5


@dataclass(frozen=True, kw_only=True)
class LifeEnd:
    """End of a life on this node. `first_member` is the first number that none of its members has.

    `is_local`: each node has its own disk for checkpoints, so this node's disk may lack checkpoints of other nodes.
    """

    life: Life
    end: End
    first_member: int
    is_local: bool = False


def after_alone(ended: LifeEnd, newest_step: int | None) -> Following:
    """Decide what follows for the only node of a job, without agreement."""
    return next_life(ended.life, ended.end, newest_step=newest_step, first_member=ended.first_member)


@dataclass(frozen=True, kw_only=True)
class SharedLives:
    """Access to the current life of a job of several nodes, in its store. `open_store` opens a new connection."""

    job: str
    secret: bytes
    key_ttl_s: float
    park_timeout_s: float
    open_store: Callable[[], Store]

    def has_begun(self) -> bool:
        """Return True if a step of the current life may have been committed. Raises StoreUnavailableError."""
        with closing(self.open_store()) as plain:
            store = SealedStore(plain, self.secret)
            keys = JobKeys(store, scope(self.job, read_life(store, self.job)[1].number))
            return store.get(keys.prefix + "begun") is not None

    def begin_next(self, end: End, newest_step: int | None) -> Following:
        """Begin the next life.

        The caller must know that no node of the current one is left. Raises StoreUnavailableError.
        """
        with closing(self.open_store()) as plain:
            store = SealedStore(plain, self.secret)
            ended = LifeEnd(life=read_life(store, self.job)[1], end=end, first_member=0)
            return agree(store, self.job, self.key_ttl_s, ended, newest_step)

    def after(self, ended: LifeEnd, newest_step: int | None) -> Following:
        """Agree with the other nodes on what follows. Raises StoreUnavailableError after `park_timeout_s`."""
        deadline_s = time.monotonic() + self.park_timeout_s
        while True:
            try:
                with closing(self.open_store()) as plain:
                    return agree(SealedStore(plain, self.secret), self.job, self.key_ttl_s, ended, newest_step)
            except StoreUnavailableError:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(_ASK_AGAIN_S)


def agree(store: SealedStore, job: str, key_ttl_s: float, ended: LifeEnd, newest_step: int | None) -> Following:
    """Begin the next life in the store, or return the one that another node has begun."""
    old = JobKeys(store, scope(job, ended.life.number), key_ttl_s)
    stands = read_life(store, job)[1]
    if stands.number > ended.life.number:
        return Following(life=stands, reason=_found(stands))
    following = _begin_next(store, job, key_ttl_s, ended, _newest_known(store, old, ended, newest_step))
    # The agents did not delete these keys, so that nodes that came meanwhile could see how the life ended.
    if ended.end.lost:
        old.remove_all()
    return following


def _newest_known(store: SealedStore, old: JobKeys, ended: LifeEnd, own: int | None) -> int | None:
    """Return the step of the newest checkpoint.

    With local disks the store's record counts, because a node that came late has no checkpoint on its own disk.
    """
    if not ended.is_local:
        return own
    there = store.get(old.prefix + "checkpoint")
    if there is not None:
        return int(old.read(there)["step"])
    before = ended.life.step if ended.life.step >= 0 else None
    return own if own is not None else before


def _begin_next(store: SealedStore, job: str, key_ttl_s: float, ended: LifeEnd, newest_step: int | None) -> Following:
    counter = JobKeys(store, scope(job, ended.life.number)).prefix + "members"
    while True:
        # The counter covers members on nodes that this agent has never met. Numbers may be taken until the next life
        # begins, so one transaction checks the counter and begins the life.
        used, revision = _counted(store, counter)
        first_member = max(ended.first_member, used)
        following = next_life(ended.life, ended.end, newest_step=newest_step, first_member=first_member)
        if following.life is None:
            return following
        lease = JobKeys(store, scope(job, following.life.number), key_ttl_s).lease()
        stands = begin_life(store, job, following.life, lease, {counter: revision})
        if stands is not None:
            return following if stands == following.life else Following(life=stands, reason=_found(stands))


def _counted(store: SealedStore, counter: str) -> tuple[int, int]:
    """Return the count of used numbers, and the revision of its key; zeros if the key is missing."""
    there = store.get(counter)
    return (int(there.value), there.revision) if there is not None else (0, 0)


def _found(life: Life) -> str:
    start = f"reads the checkpoint of step {life.step}" if life.step >= 0 else "has new workers"
    return f"life {life.number}, which {start}, has begun"


def tell(following: Following, ended: LifeEnd, log: EventLog) -> End:
    """Report what follows on the screen and in the event log, and return the end for the operator."""
    end = last_end(ended.end, following)
    if following.life is not None:
        log.write("life", number=following.life.number, step=following.life.step, reason=ended.end.sentence)
        say(f"{ended.end.sentence}. {following.reason}")
    return end
