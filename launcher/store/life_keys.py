"""The key that says which life a job is in: one for all its lives, and so outside the prefix of each.

Encoding and transactions, as in `views`; whether a life begins is decided in `lives`.
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
    """The job is in a later life than the one whose keys these are."""


def life_key(job: str) -> str:
    """`job`: the name of any of its lives."""
    return f"/elastrain/.lives/{job_of(job)}"


def read_life(store: Store, job: str) -> tuple[int, Life]:
    """The revision of the key, 0 for none, and the life that the job is in. Raises ValueError for what is none."""
    there = store.get(life_key(job))
    return (0, Life()) if there is None else (there.revision, _decode(there.value))


def as_stored(life: Life) -> Life:
    """What all nodes have in common of it: without what one of them would start it from."""
    return Life(number=life.number, step=life.step, first_member=life.first_member, barren=life.barren)


def begin_life(
    store: Store, job: str, life: Life, lease: int | None, counted: Mapping[str, int] = MappingProxyType({})
) -> Life | None:
    """Say that the job goes on in `life`. Returns the life that stands: this one, or another's that is as late.

    lease: of that life's own keys: the key goes with them. Raises LeaseLostError.
    counted: keys and revisions from which this life was made; None is returned where one of them has changed.
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
