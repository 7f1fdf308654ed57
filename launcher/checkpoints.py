"""What the launcher asks of a job's durable checkpoints: which one to start from, and how far the newest goes.

No torch is imported for it, and the rooms of the checkpoints only when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastrain.base.resume import Resume
from elastrain.errors import ConfigError
from elastrain.launcher.offers import DiskOffer
from elastrain.launcher.run_options import AUTO, NONE, RunOptions

if TYPE_CHECKING:
    from elastrain.snapshot.durable.choosing import Choice
    from elastrain.snapshot.durable.manifest import Manifest
    from elastrain.snapshot.durable.owner import Claim
    from elastrain.snapshot.durable.places.port import CheckpointPlace

_OFFERS_MAX = 8


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a job starts from, and one line that says so; empty where nobody has to be told."""

    resume: Resume | None
    sentence: str = ""
    offers: tuple[DiskOffer, ...] = ()
    """What this node's own disk has, where disks are local: all nodes choose together."""
    named: str = ""
    """What the command names then; empty where the newest is taken, if there is one."""


def newest_step(options: RunOptions) -> int | None:
    """None where no checkpoint was asked for, or none is complete. Looks at sizes and marks, reads no shard.

    Where disks are local it is the newest that this node has a part of: whether it is complete all nodes say together.
    """
    if options.checkpoints is None:
        return None
    from elastrain.snapshot.durable.errors import CheckpointError
    from elastrain.snapshot.durable.manifest import place_in_time
    from elastrain.snapshot.durable.places.opening import place_at
    from elastrain.snapshot.durable.publishing import visible

    place = options.checkpoints.place
    try:
        if options.checkpoints.is_local:
            newest = [place_in_time(name) for name in visible(place_at(place))][-1:]
            return newest[0][1] if newest and newest[0] else None
        found = _choose(place, is_thorough=False).checkpoint
    except CheckpointError:
        return None
    return None if found is None else found.manifest.step


@contextmanager
def held_place(options: RunOptions) -> Iterator[None]:
    """Write something where checkpoints are to be, and hold it for this job, before any worker starts.

    The kernel lets go of it with this process. A job that has written nothing there leaves nothing there. Raises
    ConfigError where it cannot be written, is a living job's, or has checkpoints beside which the job may not write.
    """
    if options.checkpoint_dir is None:
        yield
        return
    from elastrain.snapshot.durable.errors import CheckpointError
    from elastrain.snapshot.durable.places.opening import place_at

    is_new = not _is_there(options.checkpoint_dir)
    claim = _claimed(options)
    try:
        yield
    finally:
        # What is written is whole; what cannot be tidied up now is in nobody's way.
        with suppress(CheckpointError):
            if claim is not None:
                claim.withdraw()
            if is_new and not (place := place_at(options.checkpoint_dir)).names():
                place.remove("")


def _is_there(folder: str) -> bool:
    from elastrain.snapshot.durable.errors import CheckpointError
    from elastrain.snapshot.durable.places.opening import place_at

    try:
        return place_at(folder).exists()
    except CheckpointError:  # `_claimed` says it
        return True


def _claimed(options: RunOptions) -> Claim | None:
    from elastrain.snapshot.durable.errors import CheckpointError, TakenError
    from elastrain.snapshot.durable.owner import claim, hold_for
    from elastrain.snapshot.durable.places.opening import place_at
    from elastrain.snapshot.durable.publishing import try_out

    assert options.checkpoint_dir is not None
    try:
        place = place_at(options.checkpoint_dir)
        try_out(place)
        # Of local disks, each node holds its own.
        held = hold_for(place, options.job)
        return claim(place, options.job) if held is None and options.resume.source == NONE else held
    except TakenError as error:
        raise ConfigError(f"--checkpoint-dir: {error}") from None
    except CheckpointError as error:
        raise ConfigError(f"--checkpoint-dir {options.checkpoint_dir}: no checkpoint can be written: {error}") from None


def find_start(options: RunOptions) -> Beginning:
    """The checkpoint that the options ask for. Raises ConfigError where one that was named is not good."""
    from elastrain.snapshot.durable.errors import CheckpointError

    wish, folder = options.resume, options.checkpoint_dir
    if wish.source == NONE or (wish.source == AUTO and folder is None):
        return Beginning(resume=None)
    try:
        if options.checkpoints is not None and options.checkpoints.source is not None:
            return _offered(options, options.checkpoints.source)
        return _newest(options, str(folder)) if wish.source == AUTO else _named(options, wish.source)
    except CheckpointError as error:
        raise ConfigError(f"--resume {wish.source}: {error}") from None


def _newest(options: RunOptions, place: str) -> Beginning:
    choice = _choose(place, is_thorough=options.resume.is_thorough)
    passed_over = "".join(f"; {reason}" for reason in choice.reasons)
    if choice.checkpoint is None:
        none = "there is no checkpoint" if not choice.reasons else "no checkpoint is good"
        return Beginning(resume=None, sentence=f"{none} in {place}: the job starts anew{passed_over}")
    resume = _resume(choice.checkpoint.manifest, place, options)
    return Beginning(resume=resume, sentence=_sentence(resume) + passed_over)


def _named(options: RunOptions, source: str) -> Beginning:
    """A checkpoint's own folder, or a directory of them, of which the newest counts: it must be good."""
    from elastrain.snapshot.durable.choosing import candidates, thorough
    from elastrain.snapshot.durable.places.opening import checkpoint_at
    from elastrain.snapshot.durable.reading import Checkpoint

    at, named = checkpoint_at(source or "nothing")
    if not source or not at.exists():
        raise ConfigError(f"--resume {source!r}: there is no such folder: name a checkpoint, or write auto or none")
    name = named or next(iter(candidates([at])), None)
    if name is None:
        raise ConfigError(f"--resume {source}: there is no checkpoint")
    checkpoint = Checkpoint.open([at], name)
    problems = thorough(checkpoint)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(f"--resume {source}: {problems[0]}{more}: name an older one, or say --resume auto")
    resume = _resume(checkpoint.manifest, at.location, options)
    return Beginning(resume=resume, sentence=_sentence(resume))


def _offered(options: RunOptions, source: str) -> Beginning:
    """What lies in this node's part of the source; a checkpoint's name may be given, too."""
    from elastrain.snapshot.durable.manifest import place_in_time
    from elastrain.snapshot.durable.places.opening import place_at

    place, asked = place_at(source), options.resume.source
    named = Path(asked).name if place_in_time(Path(asked).name) else None
    names = [name for name in place.names() if place_in_time(name) and named in (None, name)]
    offers = [_offer(options, place, name) for name in names[-_OFFERS_MAX:]]
    sentence = "there is no checkpoint on the disks of this job's nodes yet: the job starts anew"
    return Beginning(resume=None, sentence=sentence, offers=tuple(offers), named="" if asked == AUTO else asked)


def _offer(options: RunOptions, place: CheckpointPlace, name: str) -> DiskOffer:
    """Of one checkpoint: its parts that lie here and are good."""
    from elastrain.snapshot.durable.errors import CheckpointError
    from elastrain.snapshot.durable.reading import Checkpoint

    files = tuple(file for file in place.names(name) if file.startswith("part-"))
    try:
        checkpoint = Checkpoint.open([place], name)
        damaged = checkpoint.damaged(is_thorough=options.resume.is_thorough)
    except CheckpointError:
        return DiskOffer(name=name, files=files)
    return DiskOffer(
        name=name,
        files=tuple(file for file in files if file not in damaged),
        content=checkpoint.manifest.content,
        needs=checkpoint.manifest.needs,
        resume=_resume(checkpoint.manifest, place.location, options),
    )


def _choose(place: str, *, is_thorough: bool) -> Choice:
    from elastrain.snapshot.durable.choosing import choose, quick, thorough
    from elastrain.snapshot.durable.places.opening import place_at

    return choose([place_at(place)], thorough if is_thorough else quick)


def _resume(manifest: Manifest, place: str, options: RunOptions) -> Resume:
    scaler = manifest.counters.get("scaler") or {}
    return Resume(
        place=place if "://" in place else str(Path(place).absolute()),
        name=manifest.name,
        step=manifest.step,
        scale=scaler.get("scale"),
        clean_steps=scaler.get("clean_steps", 0),
        spec=manifest.spec,
        changes=manifest.changes,
        accepts_changes=options.resume.accepts_changes,
    )


def _sentence(resume: Resume) -> str:
    if resume.step < 0:
        return f"the job starts with the parameters of {resume}"
    return f"the job goes on after step {resume.step}, from {resume}"
