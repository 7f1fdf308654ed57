"""Whose a place is: one job's at a time, by a file in it that the processes of that job hold. No torch.

A job that resumes from another one's checkpoints takes the place over, when no process of the other one is alive.
"""

from __future__ import annotations

import secrets
import time

import msgspec

from elastrain.snapshot.durable.errors import CheckpointError, DamagedError, TakenError
from elastrain.snapshot.durable.manifest import place_in_time
from elastrain.snapshot.durable.places.port import CheckpointPlace, FileHold
from elastrain.snapshot.durable.publishing import get, put, visible

OWNER = "owner.json"
_BYTES_MAX = 4096
_TRIES, _APART_S = 100, 0.05
"""While another process of the same job is taking the place over, this one looks again: a slow disk takes its time."""
_SEEN_LIVING = 4
"""So often a process of the owner is seen before it counts as alive: once may be one that was taking the place over."""
_ENDS_S = 5.0
"""What is left of a job whose launcher was killed has ended by then, and holds the place no longer."""


class Owner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file says. `claim` is another one each time a place changes hands."""

    format: int = 1
    job: str
    claim: str


_DECODER = msgspec.json.Decoder(Owner)


class Claim:
    """This process's part in its job's claim to a place; it ends with the process, or with `release`."""

    def __init__(self, place: CheckpointPlace, owner: Owner, hold: FileHold) -> None:
        self._place, self._owner, self._hold = place, owner, hold

    def check(self) -> None:
        """To be called before anything becomes visible. Raises TakenError if another job has taken the place over."""
        now = owner_of(self._place)
        if now != self._owner:
            whose = f"job {now.job}" if now else "nobody"
            raise TakenError(f"{self._place.location} belongs to {whose} now: job {self._owner.job} writes no more")

    def release(self) -> None:
        """Let it go: when no process of the job holds it, another job may take the place over."""
        self._hold.release()

    def withdraw(self) -> None:
        """Let it go; where nobody has written anything beside it and nobody else holds it, it was never claimed.

        Raises CheckpointError.
        """
        self._hold.release()
        if owner_of(self._place) != self._owner or self._place.names() != [OWNER]:
            return
        try:
            alone = _alone(self._place, self._owner)
        except TakenError:
            return
        try:
            # Whoever has opened it before looks again whose it is.
            if alone.keeps_others_out and owner_of(self._place) == self._owner:
                self._place.remove(OWNER)
        finally:
            alone.release()


def claim(place: CheckpointPlace, job: str, *, take_over: bool = False) -> Claim:
    """Claim the place for a job; each of its processes does so. `take_over`: the job resumes from what lies there.

    A place without a whole checkpoint is as good as new, once its owner is gone. Raises TakenError, with one sentence,
    where it is another job's, or holds checkpoints of nobody; CheckpointError.
    """
    for _ in range(_TRIES):
        owner = owner_of(place)
        if owner is not None and owner.job == job:
            held = _joined(place, owner)
            if held is not None:
                return held
        elif _may_become(place, owner, job, take_over=take_over) and _become(place, owner, job):
            continue
        time.sleep(_APART_S)
    raise TakenError(f"{place.location} is being claimed by another process: start again, or name another directory")


def hold_for(place: CheckpointPlace, job: str) -> Claim | None:
    """Refuse a place that a living process of another job holds; else hold it, as far as it holds no checkpoints yet.

    None where others' checkpoints lie there: a job that goes on from them takes the place over once nothing refuses
    it any more. Raises TakenError, with one sentence; CheckpointError.
    """
    owner = owner_of(place)
    if owner is not None and owner.job != job:
        _await_end(place, owner)
    is_open = owner is not None and owner.job == job
    return claim(place, job) if is_open or not any(place_in_time(name) for name in place.names()) else None


def owner_of(place: CheckpointPlace) -> Owner | None:
    """Who owns the place; None if nobody does. Raises DamagedError, CheckpointError."""
    if OWNER not in place.names():
        return None
    try:
        owner = _DECODER.decode(get(place, OWNER, at_most_bytes=_BYTES_MAX))
    except (ValueError, RecursionError) as error:
        raise DamagedError(
            f"{place.location}/{OWNER} is damaged ({error}): remove it if no job uses this directory"
        ) from None
    if owner.format != 1:
        raise CheckpointError(f"{place.location}/{OWNER} has format {owner.format}: use the version that wrote it")
    return owner


def _joined(place: CheckpointPlace, owner: Owner) -> Claim | None:
    """None where the file changed hands meanwhile."""
    try:
        hold = place.hold(OWNER, alone=False)
    except CheckpointError:
        return None
    if owner_of(place) == owner:
        return Claim(place, owner, hold)
    hold.release()
    return None


def _may_become(place: CheckpointPlace, owner: Owner | None, job: str, *, take_over: bool) -> bool:
    # Nothing is lost where nothing is visible: `_become` refuses while a process of the owner lives. Nor has the place
    # an owner while another process of this job takes it over, and none ever where that one was killed meanwhile.
    if take_over or not visible(place):
        return True
    if owner is not None:
        raise TakenError(
            f"{place.location} holds checkpoints of job {owner.job}, and this is job {job}: "
            "name another --checkpoint-dir, or resume from it with --resume auto"
        )
    raise TakenError(
        f"{place.location} holds checkpoints already: name another --checkpoint-dir, or resume from it with "
        "--resume auto"
    )


def _become(place: CheckpointPlace, owner: Owner | None, job: str) -> bool:
    """Make the place this job's, unless somebody else is faster; False while another process has its hands on it.

    Raises TakenError where a process of the owner is alive.
    """
    hold = _alone_if_nobody_lives(place, owner) if owner is not None else None
    if owner is not None and hold is None:
        return False
    try:
        if owner_of(place) == owner:
            place.remove(OWNER)
            put(place, OWNER, msgspec.json.encode(Owner(job=job, claim=secrets.token_hex(8))))
    except TakenError:
        pass  # somebody was faster: the caller looks whose it is now
    finally:
        if hold is not None:
            hold.release()
    return True


def _alone_if_nobody_lives(place: CheckpointPlace, owner: Owner) -> FileHold | None:
    """None where another process takes the place over, or was about to. Raises TakenError where the owner is alive."""
    # Whoever owns the place shares it with the other processes of its job; whoever takes it over keeps all others out.
    for _ in range(_SEEN_LIVING):
        try:
            return _alone(place, owner)
        except TakenError:
            if not _is_shared(place):
                return None
        time.sleep(_APART_S)
    return _alone(place, owner)


def _is_shared(place: CheckpointPlace) -> bool:
    try:
        place.hold(OWNER, alone=False).release()
    except CheckpointError:  # somebody keeps others out, or has just removed the file
        return False
    return True


def _await_end(place: CheckpointPlace, owner: Owner) -> None:
    """Raises TakenError where a process of the owner lives on: those of a job that was killed are about to end."""
    until_s = time.monotonic() + _ENDS_S
    while True:
        try:
            _alone(place, owner).release()
        except TakenError:
            if time.monotonic() > until_s:
                raise
            time.sleep(_APART_S)
        else:
            return


def _alone(place: CheckpointPlace, owner: Owner) -> FileHold:
    """Raises TakenError where a process of the owner is alive."""
    try:
        return place.hold(OWNER, alone=True)
    except TakenError:
        raise TakenError(
            f"{place.location} is in use by job {owner.job}, which is alive: end it first, or name another "
            "--checkpoint-dir"
        ) from None
