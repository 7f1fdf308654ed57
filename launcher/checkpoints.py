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
    if "://" not in place and not Path(place).exists():
        return Beginning(resume=None, sentence=f"there is no checkpoint in {place} yet: the job starts anew")
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
    from elastrain.snapshot.durable.manifest import place_in_time
    from elastrain.snapshot.durable.places.opening import place_at
    from elastrain.snapshot.durable.reading import Checkpoint

    place, _, name = source.rstrip("/").rpartition("/")
    if place_in_time(name) is None:
        place = source
        name = next(iter(candidates([place_at(place)])), "")
        if not name:
            raise ConfigError(f"--resume {source}: there is no checkpoint")
    checkpoint = Checkpoint.open([place_at(place or ".")], name)
    problems = thorough(checkpoint)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(f"--resume {source}: {problems[0]}{more}: name an older one, or say --resume auto")
    resume = _resume(checkpoint.manifest, place or ".", options)
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
