"""Ownership of a place: one job at a time owns it, by a file that all processes of the job lock. No torch.

A job that resumes from another job's checkpoints takes the place over once no process of that other job is alive.
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
"""Name of the owner file."""
_BYTES_MAX = 4096
_TRIES, _APART_S = 100, 0.05
"""Attempts, and seconds between them, while another process of the same job takes the place over.

A slow disk needs several of them.
"""
_SEEN_LIVING = 4
"""Times that a lock of the owner must be seen before the owner counts as alive.

A single sighting may be a process that was taking the place over.
"""
_ENDS_S = 5.0
"""Seconds after which the processes of a job whose launcher was killed have ended and released their locks."""


class Owner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the owner file. `claim` is random and changes whenever the place gets a new owner."""

    format: int = 1
    job: str
    claim: str


_DECODER = msgspec.json.Decoder(Owner)


class Claim:
    """A lock of this process on the owner file of its job. It ends with the process, or with `release`."""

    def __init__(self, place: CheckpointPlace, owner: Owner, hold: FileHold) -> None:
        self._place, self._owner, self._hold = place, owner, hold

    def check(self) -> None:
        """Raise TakenError if another job has taken the place over.

        Call it before anything becomes visible.
        """
        now = owner_of(self._place)
        if now != self._owner:
            whose = f"job {now.job}" if now else "no job"
            raise TakenError(f"{self._place.location} belongs to {whose} now: job {self._owner.job} writes no more")

    def release(self) -> None:
        """Release the lock. Once no process of the job holds one, another job may take the place over."""
        self._hold.release()

    def withdraw(self) -> None:
        """Release the lock. Remove the owner file if the place has no other files and no other process holds a lock.

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
            # A process that opened the file before its removal reads the owner again after locking.
            if alone.keeps_others_out and owner_of(self._place) == self._owner:
                self._place.remove(OWNER)
        finally:
            alone.release()


def claim(place: CheckpointPlace, job: str, *, take_over: bool = False) -> Claim:
    """Claim the place for a job. Each process of the job calls it.

    A place without a complete checkpoint may be taken once its owner is dead.

    Args:
        place: The place to claim.
        job: Id of the job.
        take_over: True if the job resumes from the checkpoints in this place, so that it may replace the old owner.

    Raises:
        TakenError: If the place belongs to another job, or holds checkpoints without an owner.
        CheckpointError: If the place cannot be read or written.
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
    """Refuse a place that another living job owns. Else claim it if this job owns it or it has no checkpoints.

    Returns None if it has checkpoints of another job. A job that resumes from them calls `claim` with `take_over`
    later, when nothing else stops it. Raises TakenError if another job is alive, and CheckpointError.
    """
    owner = owner_of(place)
    if owner is not None and owner.job != job:
        _await_end(place, owner)
    is_open = owner is not None and owner.job == job
    return claim(place, job) if is_open or not any(place_in_time(name) for name in place.names()) else None


def owner_of(place: CheckpointPlace) -> Owner | None:
    """Return the owner of the place, or None. Raises DamagedError and CheckpointError."""
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
    """Return a shared claim, or None if the owner changed in the meantime."""
    try:
        hold = place.hold(OWNER, alone=False)
    except CheckpointError:
        return None
    if owner_of(place) == owner:
        return Claim(place, owner, hold)
    hold.release()
    return None


def _may_become(place: CheckpointPlace, owner: Owner | None, job: str, *, take_over: bool) -> bool:
    # Without visible checkpoints nothing can be lost, and `_become` refuses while the owner is alive. The place has no
    # owner while another process of this job takes it over, or if that process was killed meanwhile.
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
    """Make the place this job's. Returns False while another process is changing the owner.

    Another process may be faster; the caller then finds a different owner. Raises TakenError if the owner is alive.
    """
    hold = _alone_if_owner_is_dead(place, owner) if owner is not None else None
    if owner is not None and hold is None:
        return False
    try:
        if owner_of(place) == owner:
            place.remove(OWNER)
            put(place, OWNER, msgspec.json.encode(Owner(job=job, claim=secrets.token_hex(8))))
    except TakenError:
        pass  # another process was faster: the caller reads the owner again
    finally:
        if hold is not None:
            hold.release()
    return True


def _alone_if_owner_is_dead(place: CheckpointPlace, owner: Owner) -> FileHold | None:
    """Return an exclusive lock on the owner file, or None if another process is taking the place over.

    Raises TakenError if the owner is alive.
    """
    # Processes of the owner hold shared locks. A process that takes the place over holds an exclusive one.
    for _ in range(_SEEN_LIVING):
        try:
            return _alone(place, owner)
        except TakenError:
            if not _is_shared(place):
                return None
        time.sleep(_APART_S)
    return _alone(place, owner)


def _is_shared(place: CheckpointPlace) -> bool:
    """Return True if the owner file can be locked shared: no process holds it exclusively."""
    try:
        place.hold(OWNER, alone=False).release()
    except CheckpointError:  # a process holds an exclusive lock, or has just removed the file
        return False
    return True


def _await_end(place: CheckpointPlace, owner: Owner) -> None:
    """Wait for the processes of the owner to end. Raises TakenError if one is still alive after _ENDS_S.

    After a job was killed, its processes end within that time.
    """
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
    """Lock the owner file exclusively. Raises TakenError if a process of the owner is alive."""
    try:
        return place.hold(OWNER, alone=True)
    except TakenError:
        raise TakenError(
            f"{place.location} is in use by job {owner.job}, which is alive: end it first, or name another "
            "--checkpoint-dir"
        ) from None
