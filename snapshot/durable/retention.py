"""The choice of the checkpoint to resume from, and of the checkpoints to remove.

`choose` finds the newest good checkpoint, and says why newer ones are passed over. `prune` decides over plain values
which folders go: old checkpoints by count and age, and what interrupted writes left behind.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastrain.snapshot.durable.errors import CheckpointError, OtherFormatError
from elastrain.snapshot.durable.manifest import MANIFEST, VERIFIED, place_in_time
from elastrain.snapshot.durable.places.local import TEMPORARY
from elastrain.snapshot.durable.places.port import CheckpointPlace
from elastrain.snapshot.durable.publishing import get, mark_verified, visible
from elastrain.snapshot.durable.reading import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The result of `choose`. `checkpoint` is None if there is no good one.

    `reasons` has one sentence for each newer checkpoint that was passed over.
    """

    checkpoint: Checkpoint | None
    reasons: tuple[str, ...]


def quick(checkpoint: Checkpoint) -> list[str]:
    """Return problems that manifest, files, sizes and descriptions show. Readers check the bytes later."""
    return [*checkpoint.look(), *_elsewhere(checkpoint)]


def thorough(checkpoint: Checkpoint) -> list[str]:
    """Return problems after reading every byte, without torch.

    A damaged copy of a shard is no problem if another copy is good.
    """
    return [*checkpoint.verify(every_copy=False, digests=False), *_elsewhere(checkpoint)]


def _elsewhere(checkpoint: Checkpoint) -> list[str]:
    """Return a problem if parts lie only on the disks of other nodes, where this process cannot read them."""
    lacking = checkpoint.lacking() if checkpoint.manifest.is_spread else []
    return [f"{', '.join(lacking[:3])}{' …' * (len(lacking) > 3)}: on the disks of other nodes only"] if lacking else []


def choose(
    places: Sequence[CheckpointPlace],
    problems_of: Callable[[Checkpoint], list[str]] = quick,
    passed_over: Sequence[str] = (),
) -> Choice:
    """Return the newest checkpoint without problems. All places together may hold its parts.

    Args:
        places: The places to look in, for example the disk of each node.
        problems_of: Returns the problems of a checkpoint as sentences.
        passed_over: Names of checkpoints that are known to be bad. They are skipped.

    Raises:
        CheckpointError: If a place cannot be read.
        OtherFormatError: If another version wrote a newer checkpoint. It is not damaged, so skipping it would lose
            steps.
    """
    reasons: list[str] = []
    for name in candidates(places):
        if name in passed_over:
            continue
        try:
            checkpoint = Checkpoint.open(places, name)
            problems = problems_of(checkpoint)
        except OtherFormatError as error:
            raise OtherFormatError(f"{error}, or name an older checkpoint on purpose") from None
        except CheckpointError as error:
            problems = [str(error)]
        else:
            if not problems:
                return Choice(checkpoint=checkpoint, reasons=tuple(reasons))
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        reasons.append(f"{name} is passed over: {problems[0]}{more}")
    return Choice(checkpoint=None, reasons=tuple(reasons))


def candidates(places: Sequence[CheckpointPlace]) -> list[str]:
    """Return the names of all checkpoints with a manifest in any place, the newest first (by life, then by step)."""
    names = {name for place in places for name in visible(place)}
    return sorted(names, key=lambda name: place_in_time(name) or (-1, -1), reverse=True)


def left_behind(there: Sequence[str], since: str, is_ours: Callable[[str], bool]) -> list[str]:
    """Return checkpoints that are newer than `since` and were written by other processes.

    Their steps are lost if the job was told to resume from `since`.

    Args:
        there: Names of all checkpoints.
        since: Name of a checkpoint. If it is another text, the result is empty.
        is_ours: Returns True if this process wrote the checkpoint of that name.
    """
    told = place_in_time(since)
    newer = [name for name in there if (place_in_time(name) or (-1, -1)) > told] if told else []
    return [name for name in newer if not is_ours(name)]


def lives_before(there: Sequence[str], name: str, life: int) -> int:
    """Return the number to add to a job's life numbers, so that new lives follow those in `there`.

    Args:
        there: Checkpoints in the directory that the job writes to, the newest last.
        name: The checkpoint that the job resumes from.
        life: Number of the job's life within this command. The first life continues the life of the newest checkpoint
            if it resumes from that one.
    """
    if not there:
        return 0
    newest = there[-1]
    its_life, _ = place_in_time(newest) or (0, -1)
    return max(0, its_life - life + (0 if newest == name and life == 1 else 1))


Moment = tuple[int, int]
"""Life and step of a checkpoint."""
NEVER: Moment = (-1, -2)
"""A moment before all checkpoints."""
_SMALL_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A checkpoint's folder, as `prune` needs it."""

    name: str
    is_visible: bool
    """True if the folder has a manifest."""
    is_verified: bool
    """True if the checkpoint was read back completely."""
    time_s: float
    """Unix time of its commit. Infinite if unknown, so that the checkpoint is never too old."""


@dataclass(frozen=True, kw_only=True)
class Removal:
    """A folder to remove, and the reason."""

    name: str
    reason: str


def prune(
    entries: Sequence[Kept], *, keep: int, now_s: float, age_s: float | None = None, over: Moment = NEVER
) -> tuple[Removal, ...]:
    """Return the folders to remove, the oldest first.

    A checkpoint may be removed only if a newer one was verified. The newest verified checkpoint and all newer ones
    stay. Folders without a manifest are removed once no process can be writing to them.

    Args:
        entries: All folders.
        keep: Number of checkpoints to keep, at least 1.
        now_s: Present Unix time.
        age_s: Age in seconds from which a checkpoint is removed; None for no limit.
        over: Up to this moment no checkpoint is being written.

    Raises:
        ValueError: If `keep` is less than 1.
    """
    if keep < 1:
        raise ValueError(f"at least one checkpoint is kept; got {keep}")
    seen = [entry for entry in entries if entry.is_visible]
    verified = max((_when(entry) for entry in seen if entry.is_verified), default=NEVER)
    gone = []
    # Checkpoints become visible in rising order. A folder without a manifest that is older than a verified checkpoint
    # never becomes visible, so no process needs it.
    for entry in sorted(entries, key=_when):
        when = _when(entry)
        newer = sum(_when(other) > when for other in seen)
        if not entry.is_visible and when <= max(verified, over):
            gone.append(Removal(name=entry.name, reason="it was interrupted, or given up"))
        elif not entry.is_visible or when >= verified:
            continue
        elif newer >= keep:
            gone.append(Removal(name=entry.name, reason=f"{newer} newer ones are there, and {keep} are kept"))
        elif age_s is not None and now_s - entry.time_s > age_s:
            gone.append(Removal(name=entry.name, reason=f"it is older than {age_s:.0f} s"))
    return tuple(gone)


def _when(entry: Kept) -> Moment:
    return place_in_time(entry.name) or NEVER


def kept(place: CheckpointPlace, *, with_times: bool = False) -> list[Kept]:
    """Return the folders of a place.

    Without `with_times`, or if a manifest cannot be read, the time is infinite. Raises CheckpointError.
    """
    entries = []
    for name in place.names():
        if place_in_time(name) is None:
            continue
        files = place.names(name)
        entries.append(
            Kept(
                name=name,
                is_visible=MANIFEST in files,
                is_verified=VERIFIED in files,
                time_s=_time_s(place, name) if with_times and MANIFEST in files else math.inf,
            )
        )
    return entries


def _time_s(place: CheckpointPlace, name: str) -> float:
    try:
        return Checkpoint.open([place], name).manifest.time_s
    except CheckpointError:
        return math.inf


def remove(place: CheckpointPlace, name: str) -> None:
    """Remove a checkpoint's folder. The manifest goes first, so that no incomplete checkpoint is ever visible.

    Files of other programs stay, and the folder with them. Raises CheckpointError.
    """
    place.remove(f"{name}/{MANIFEST}")
    for file in place.names(name):
        if file == VERIFIED or file.startswith(("part-", TEMPORARY)):
            place.remove(f"{name}/{file}")
    if not place.names(name):
        place.remove(name)


def tidy(place: CheckpointPlace, *, keep: int, age_s: float | None = None, over: Moment = NEVER) -> list[str]:
    """Verify the newest checkpoint, then `clear`. Returns sentences about removals and problems."""
    try:
        there = visible(place)
        if len(there) > (keep if age_s is None else 1):  # else nothing can be removed, so verifying is not needed
            if problems := Checkpoint.open([place], there[-1]).verify(digests=False):
                return [f"{there[-1]} is damaged, and nothing is removed: {problems[0]}"]
            mark_verified(place, there[-1])
        return clear(place, keep=keep, age_s=age_s, over=over)
    except CheckpointError as error:
        return [str(error)]


def clear(place: CheckpointPlace, *, keep: int, age_s: float | None, over: Moment = NEVER) -> list[str]:
    """Remove old checkpoints and abandoned files. Returns a sentence for each removed checkpoint.

    Reads manifests only if `age_s` is given. Raises CheckpointError.
    """
    there = kept(place, with_times=age_s is not None)
    gone = prune(there, keep=keep, now_s=time.time(), age_s=age_s, over=over)
    for removal in gone:
        remove(place, removal.name)
    for name in place.names():
        if name.startswith(TEMPORARY) and _is_abandoned(place, name):
            place.remove(name)
    return [f"{removal.name} is removed: {removal.reason}" for removal in gone]


def _is_abandoned(place: CheckpointPlace, temporary: str) -> bool:
    """Return True if the process that began this temporary file beside the checkpoints is dead.

    A living process holds a lock on the file, or has written nothing into it yet.
    """
    try:
        hold = place.hold(temporary, alone=True)
        hold.release()
        return hold.keeps_others_out and bool(get(place, temporary, at_most_bytes=_SMALL_BYTES))
    except CheckpointError:
        return False
