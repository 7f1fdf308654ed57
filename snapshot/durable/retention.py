"""Which checkpoint a job begins from: the newest good one, and in words why newer ones are passed over.

What may go: old checkpoints by count and age, and what interrupted writes left. `prune` decides over values.
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
    """`checkpoint` is None where no good one is there; `reasons` has a sentence per newer one that was passed over."""

    checkpoint: Checkpoint | None
    reasons: tuple[str, ...]


def quick(checkpoint: Checkpoint) -> list[str]:
    """Manifest, files, sizes, descriptions; the bytes are checked by whoever reads them."""
    return [*checkpoint.look(), *_elsewhere(checkpoint)]


def thorough(checkpoint: Checkpoint) -> list[str]:
    """Everything is read; no torch. A damaged copy of a shard does not count where another one is good."""
    return [*checkpoint.verify(every_copy=False, digests=False), *_elsewhere(checkpoint)]


def _elsewhere(checkpoint: Checkpoint) -> list[str]:
    """What lies on the disks of other nodes, and so cannot be read here."""
    lacking = checkpoint.lacking() if checkpoint.manifest.is_spread else []
    return [f"{', '.join(lacking[:3])}{' …' * (len(lacking) > 3)}: on the disks of other nodes only"] if lacking else []


def choose(
    places: Sequence[CheckpointPlace],
    problems_of: Callable[[Checkpoint], list[str]] = quick,
    passed_over: Sequence[str] = (),
) -> Choice:
    """The newest checkpoint without problems, looked for in all places together (each node's disk, say).

    `passed_over` are names that are known to be bad (a shard was found damaged while it was read): not looked at again.
    Raises CheckpointError where a place cannot be looked into, OtherFormatError where another version has written a
    newer one: that is not damaged, and to pass it over would lose its steps.
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
    """Checkpoints that have a manifest anywhere, the newest first: by life, then by step."""
    names = {name for place in places for name in visible(place)}
    return sorted(names, key=lambda name: place_in_time(name) or (-1, -1), reverse=True)


def left_behind(there: Sequence[str], since: str, is_ours: Callable[[str], bool]) -> list[str]:
    """Of the checkpoints that are there, what others have written after `since`, to which the job was told to go back.

    `since`: a checkpoint's name; another text for none. Who is asked about is newer than that.
    """
    told = place_in_time(since)
    newer = [name for name in there if (place_in_time(name) or (-1, -1)) > told] if told else []
    return [name for name in newer if not is_ours(name)]


def lives_before(there: Sequence[str], name: str, life: int) -> int:
    """What lifts a job's lives above those that are there, where its life of this number goes on from `name`.

    `there`: in the directory that it writes to, the newest last. A command that goes on from the newest one there goes
    on in that one's life.
    """
    if not there:
        return 0
    newest = there[-1]
    its_life, _ = place_in_time(newest) or (0, -1)
    return max(0, its_life - life + (0 if newest == name and life == 1 else 1))


Moment = tuple[int, int]
"""Life and step of a checkpoint."""
NEVER: Moment = (-1, -2)
_SMALL_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A checkpoint's folder as pruning sees it."""

    name: str
    is_visible: bool
    """It has a manifest."""
    is_verified: bool
    """It was read back whole."""
    time_s: float
    """Unix time of its commit; infinite where nobody knows: it is never too old."""


@dataclass(frozen=True, kw_only=True)
class Removal:
    """A folder that goes, and why."""

    name: str
    reason: str


def prune(
    entries: Sequence[Kept], *, keep: int, now_s: float, age_s: float | None = None, over: Moment = NEVER
) -> tuple[Removal, ...]:
    """What goes, the oldest first: beyond the newest `keep`, or older than `age_s`; and what nobody writes any more.

    No checkpoint goes unless a newer one has been verified; the newest verified one and all that is newer stay.
    `keep` >= 1. `over`: up to here nothing is being written any more.
    """
    if keep < 1:
        raise ValueError(f"at least one checkpoint is kept; got {keep}")
    seen = [entry for entry in entries if entry.is_visible]
    verified = max((_when(entry) for entry in seen if entry.is_verified), default=NEVER)
    gone = []
    # Checkpoints become visible in rising order, so a folder without a manifest that is older than a verified one stays
    # invisible for ever: what lies in it is certainly nobody's.
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
    """The folders of a place. A manifest that cannot be read says nothing of its time. Raises CheckpointError."""
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
    """Remove a checkpoint's folder: the manifest first, so that no half of it can ever be seen. Raises CheckpointError.

    Files that this package does not write are left, and the folder with them.
    """
    place.remove(f"{name}/{MANIFEST}")
    for file in place.names(name):
        if file == VERIFIED or file.startswith(("part-", TEMPORARY)):
            place.remove(f"{name}/{file}")
    if not place.names(name):
        place.remove(name)


def tidy(place: CheckpointPlace, *, keep: int, age_s: float | None = None, over: Moment = NEVER) -> list[str]:
    """Verify the newest one, and `clear`; what was done, or went wrong, as sentences."""
    try:
        there = visible(place)
        if len(there) > (keep if age_s is None else 1):  # else none could go, so none is read
            if problems := Checkpoint.open([place], there[-1]).verify(digests=False):
                return [f"{there[-1]} is damaged, and nothing is removed: {problems[0]}"]
            mark_verified(place, there[-1])
        return clear(place, keep=keep, age_s=age_s, over=over)
    except CheckpointError as error:
        return [str(error)]


def clear(place: CheckpointPlace, *, keep: int, age_s: float | None, over: Moment = NEVER) -> list[str]:
    """Remove what may go; a sentence for each. Ages are asked for only where they count. Raises CheckpointError."""
    there = kept(place, with_times=age_s is not None)
    gone = prune(there, keep=keep, now_s=time.time(), age_s=age_s, over=over)
    for removal in gone:
        remove(place, removal.name)
    for name in place.names():
        if name.startswith(TEMPORARY) and _is_abandoned(place, name):
            place.remove(name)
    return [f"{removal.name} is removed: {removal.reason}" for removal in gone]


def _is_abandoned(place: CheckpointPlace, temporary: str) -> bool:
    """Whether who began the small file beside the checkpoints has been killed: else it is locked, or empty yet."""
    try:
        hold = place.hold(temporary, alone=True)
        hold.release()
        return hold.keeps_others_out and bool(get(place, temporary, at_most_bytes=_SMALL_BYTES))
    except CheckpointError:
        return False
