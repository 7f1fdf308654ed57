"""Which checkpoint a job begins from: the newest good one, and in words why newer ones are passed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastrain.snapshot.durable.errors import CheckpointError, OtherFormatError
from elastrain.snapshot.durable.manifest import place_in_time
from elastrain.snapshot.durable.places.port import CheckpointPlace
from elastrain.snapshot.durable.publishing import visible
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
