"""The key of the life that a job is in. All lives share it, so it lies outside of the prefix of each.

Encoding and transactions, as in `job_keys`. Another part decides whether a life begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from elastrain.base.environment import job_of
from elastrain.launcher.shared.job_values import Life
from elastrain.launcher.store.port import Store, StoreError
from elastrain.protocol.codec import decoder_of

_decode = decoder_of(Life)


class OutlivedError(StoreError):
    """The error for access to the keys of one life of the job while the job is in a later one."""


def life_key(job: str) -> str:
    """Return the key of the job's current life. `job`: the name of any of its lives."""
    return f"/elastrain/.lives/{job_of(job)}"


def read_life(store: Store, job: str) -> tuple[int, Life]:
    """Return the revision of the key (0: absent) and the life that the job is in.

    Raises ValueError for an invalid value.
    """
    there = store.get(life_key(job))
    return (0, Life()) if there is None else (there.revision, _decode(there.value))


def as_stored(life: Life) -> Life:
    """Return the part of a life that all nodes have in common, without what one node would start it from."""
    number, step, first = life.number, life.step, life.first_member
    return Life(number=number, step=step, first_member=first, barren=life.barren, restarts=life.restarts)


def begin_life(
    store: Store, job: str, life: Life, lease: int | None, counted: Mapping[str, int] = MappingProxyType({})
) -> Life | None:
    """Record that the job goes on in `life`. Returns the life in the store: this one, or another that is as late.

    lease: that of the new life's own keys, so that this key goes with them. Raises LeaseLostError. counted: keys and
    revisions on which this life is based. None is returned if one of them has changed.
    """
    while True:
        there, stands = read_life(store, job)
        if stands.number >= life.number:
            return stands
        put = {life_key(job): msgspec.json.encode(life)}
        if store.commit(expect={life_key(job): there, **counted}, put=put, lease=lease) is not None:
            return life
        if counted:
            return None
