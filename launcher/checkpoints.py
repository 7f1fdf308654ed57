"""What the launcher asks of a job's durable checkpoints: which one to start from, and how far the newest goes.

No torch is imported for it, and the rooms of the checkpoints only when they are needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastrain.base.resume import Resume
from elastrain.errors import ConfigError
from elastrain.launcher.run_options import AUTO, NONE, RunOptions

if TYPE_CHECKING:
    from elastrain.snapshot.durable.choosing import Choice
    from elastrain.snapshot.durable.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a job starts from, and one line that says so; empty where nobody has to be told."""

    resume: Resume | None
    sentence: str = ""


def newest_step(folder: str | None) -> int | None:
    """None where no checkpoint was asked for, or none is complete. Looks at sizes and marks, reads no shard."""
    if folder is None:
        return None
    from elastrain.snapshot.durable.errors import CheckpointError

    try:
        found = _choose(folder, is_thorough=False).checkpoint
    except CheckpointError:
        return None
    return None if found is None else found.manifest.step


def try_place(options: RunOptions) -> None:
    """Write something where checkpoints are to be, before any worker starts. Raises ConfigError where that fails."""
    if options.checkpoint_dir is None:
        return
    from elastrain.snapshot.durable.errors import CheckpointError
    from elastrain.snapshot.durable.places.opening import place_at
    from elastrain.snapshot.durable.publishing import try_out

    try:
        try_out(place_at(options.checkpoint_dir))
    except CheckpointError as error:
        raise ConfigError(f"--checkpoint-dir {options.checkpoint_dir}: no checkpoint can be written: {error}") from None


def find_start(options: RunOptions) -> Beginning:
    """The checkpoint that the options ask for. Raises ConfigError where one that was named is not good."""
    from elastrain.snapshot.durable.errors import CheckpointError

    wish, folder = options.resume, options.checkpoint_dir
    if wish.source == NONE or (wish.source == AUTO and folder is None):
        return Beginning(resume=None)
    try:
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

    at, named = checkpoint_at(source)
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
