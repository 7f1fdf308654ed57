"""Questions of the launcher about durable checkpoints: which one to start from, and how far the newest goes.

Also claims the place of checkpoints for one job. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from elastrain.base.resume import Resume
from elastrain.errors import ConfigError
from elastrain.launcher.shared.checkpoint_inventory import DiskOffer
from elastrain.launcher.shared.console import ProgressBar
from elastrain.launcher.start.run_options import AUTO, NONE, RunOptions
from elastrain.snapshot.durable.errors import CheckpointError, OtherFormatError, TakenError
from elastrain.snapshot.durable.manifest import Manifest, place_in_time
from elastrain.snapshot.durable.owner import Claim, claim, hold_for
from elastrain.snapshot.durable.places.port import CheckpointPlace, checkpoint_at, place_at
from elastrain.snapshot.durable.publishing import try_out, visible
from elastrain.snapshot.durable.reading import Checkpoint
from elastrain.snapshot.durable.retention import Choice, candidates, choose, left_behind, lives_before, quick, thorough

_OFFERS_MAX = 8
_SIMULATED = re.compile(r"node\d+")


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """Start of a job: a checkpoint or None, and one line about it, or "" if there is nothing to report."""

    resume: Resume | None
    sentence: str = ""
    offers: tuple[DiskOffer, ...] = ()
    """Checkpoints on this node's own disk, if disks are local. All nodes choose one of them together."""
    named: str = ""
    """Checkpoint that the command names or a later life needs; "" if the newest is used, should there be one."""


def newest_step(options: RunOptions) -> int | None:
    """Return the step of the newest complete checkpoint, or None if there is none or none was asked for.

    Reads sizes and marks, but no shards. With local disks, return the step of the newest checkpoint of which this node
    has a part. Whether that one is complete is only known to all nodes together.
    """
    if options.checkpoints is None:
        return None
    place = options.checkpoints.place
    try:
        if options.checkpoints.is_local:
            left = _left_behind(options, place_at(place))
            newest = [place_in_time(name) for name in visible(place_at(place)) if name not in left][-1:]
            return newest[0][1] if newest and newest[0] else None
        found = _choose(options, place, is_thorough=False).checkpoint
    except CheckpointError:
        return None
    return None if found is None else found.manifest.step


@contextmanager
def held_place(options: RunOptions, *, is_of_simulated: bool = False) -> Iterator[None]:
    """Check that checkpoints can be written, and hold their place for this job, before any worker starts.

    The kernel releases the hold when this process ends. A job that has written no checkpoint leaves no files there.

    Args:
        options: the options of the run.
        is_of_simulated: set if all nodes are simulated on this machine.

    Raises:
        ConfigError: if the place is not writable or belongs to a living job. Also if it has checkpoints that the job
            would overlook, or beside which it may not write.
    """
    if options.checkpoint_dir is None:
        yield
        return
    if overlooked := _overlooked(options, options.checkpoint_dir, is_of_simulated=is_of_simulated):
        raise ConfigError(f"--checkpoint-dir {options.checkpoint_dir}: {overlooked}, or begin anew with --resume none")
    is_new = False
    with suppress(CheckpointError):  # `_claimed` reports it
        is_new = not place_at(options.checkpoint_dir).exists()
    held = _claimed(options)
    try:
        yield
    finally:
        # Written checkpoints are complete. Leftovers that cannot be removed now do no harm.
        with suppress(CheckpointError):
            if held is not None:
                held.withdraw()
            if is_new and not (place := place_at(options.checkpoint_dir)).names():
                place.remove("")


def _overlooked(options: RunOptions, folder: str, *, is_of_simulated: bool) -> str:
    """Return a hint for `--resume auto` if the only checkpoints lie where this job does not look, else "".

    These are checkpoints in folders of simulated nodes, or beside such folders.
    """
    assert options.checkpoints is not None
    if options.resume.source != AUTO:
        return ""
    try:
        place = place_at(folder)
        nodes = filter(_SIMULATED.fullmatch, place.names())
        simulated = [name for name in nodes if visible(place_at(f"{folder}/{name}"))]
        is_here = bool(visible(place))
    except CheckpointError:  # the first use of the place reports it
        return ""
    if is_here and not simulated and is_of_simulated and options.checkpoints.is_local:
        return (
            "simulated nodes have a folder each there (node0, …), and the checkpoints lie beside these: move them into "
            "one of these folders, leave out --checkpoint-layout local"
        )
    if simulated and not is_here and not (is_of_simulated and options.checkpoints.is_local):
        return (
            f"the checkpoints there are those of simulated nodes ({', '.join(simulated)}): go on with --local-nodes "
            "and --checkpoint-layout local, put the contents of these folders into one directory"
        )
    return ""


def _claimed(options: RunOptions) -> Claim | None:
    assert options.checkpoint_dir is not None
    try:
        place = place_at(options.checkpoint_dir)
        try_out(place)
        # With local disks, each node holds its own place.
        held = hold_for(place, options.job)
        return claim(place, options.job) if held is None and options.resume.source == NONE else held
    except TakenError as error:
        raise ConfigError(f"--checkpoint-dir: {error}") from None
    except CheckpointError as error:
        raise ConfigError(f"--checkpoint-dir {options.checkpoint_dir}: no checkpoint can be written: {error}") from None


def find_start(options: RunOptions, life: int = 1) -> Beginning:
    """Return the checkpoint that the options ask for.

    Args:
        options: the options of the run.
        life: the number of the life that starts from the checkpoint.

    Raises:
        ConfigError: if a named checkpoint is not good. Also if the job is to begin anew in a place with checkpoints,
            because its later lives would mistake these for their own.
    """
    wish, folder = options.resume, options.checkpoint_dir
    if folder is None and wish.source in (NONE, AUTO):
        return Beginning(resume=None)
    try:
        if wish.source == NONE:
            return _anew(str(folder))
        if options.checkpoints is not None and options.checkpoints.source is not None:
            return _offered(options, options.checkpoints.source, life)
        return _newest(options, str(folder), life) if wish.source == AUTO else _named(options, wish.source, life)
    except CheckpointError as error:
        raise ConfigError(f"--resume {wish.source}: {error}") from None


def _anew(folder: str) -> Beginning:
    if there := visible(place_at(folder)):
        raise ConfigError(
            f"--resume none: {folder} holds checkpoints already, the newest of them {there[-1]}: name another "
            "--checkpoint-dir, or resume from it with --resume auto"
        )
    return Beginning(resume=None)


def _newest(options: RunOptions, place: str, life: int) -> Beginning:
    choice = _choose(options, place, is_thorough=options.resume.is_thorough)
    passed_over = "".join(f"; {reason}" for reason in choice.reasons)
    if choice.checkpoint is None and choice.reasons:
        raise ConfigError(
            f"--resume {AUTO}: no checkpoint is good in {place}{passed_over}: name another --checkpoint-dir to begin "
            "anew"
        )
    if choice.checkpoint is None:
        return Beginning(resume=None, sentence=f"there is no checkpoint in {place}: the job starts anew")
    resume = _resume(choice.checkpoint.manifest, place, options, life)
    return Beginning(resume=resume, sentence=_sentence(resume) + passed_over)


def _named(options: RunOptions, source: str, life: int) -> Beginning:
    """Return the named checkpoint, or the newest in the named directory.

    Raises ConfigError if it is not good.
    """
    at, named = checkpoint_at(source or "nothing")
    if not source or not at.exists():
        what = "it is a file" if Path(source).is_file() else "there is no such folder"
        raise ConfigError(f"--resume {source!r}: {what}: name a checkpoint, or write auto or none")
    name = named or next(iter(candidates([at])), None)
    if name is None:
        raise ConfigError(f"--resume {source}: there is no checkpoint")
    checkpoint = Checkpoint.open([at], name)
    problems = _read_through(options, checkpoint)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(f"--resume {source}: {problems[0]}{more}: name an older one, or say --resume auto")
    resume = _resume(checkpoint.manifest, at.location, options, life)
    return Beginning(resume=resume, sentence=_sentence(resume) + _what_is_left(options, resume))


def _offered(options: RunOptions, source: str, life: int) -> Beginning:
    """Return this node's share of the checkpoints on local disks.

    Only a named checkpoint is offered if one was named.
    """
    place, asked = place_at(source), options.resume.source
    named = options.resume.named if asked != AUTO and place_in_time(options.resume.named) else ""
    left = _left_behind(options, place)
    names = [name for name in place.names() if place_in_time(name) and named in ("", name) and name not in left]
    offers = [_offer(options, place, name, life) for name in names[-_OFFERS_MAX:]]
    sentence = "there is no checkpoint on the disks of this job's nodes yet: the job starts anew"
    # A later life needs a checkpoint: nodes without any must not begin the job anew.
    least = "a checkpoint of this job" if options.resume.is_thorough else ""
    return Beginning(resume=None, sentence=sentence, offers=tuple(offers), named=least if asked == AUTO else asked)


def _offer(options: RunOptions, place: CheckpointPlace, name: str, life: int) -> DiskOffer:
    """Return the good parts of one checkpoint that lie on this node's disk."""
    files = tuple(file for file in place.names(name) if file.startswith("part-"))
    try:
        checkpoint = Checkpoint.open([place], name)
        if not options.resume.is_thorough:
            damaged = checkpoint.damaged(is_thorough=False)
        else:
            with _shown(options, checkpoint) as shown:
                damaged = shown.damaged(is_thorough=True)
    except OtherFormatError as error:  # as `choose` does
        raise OtherFormatError(f"{error}, or name an older checkpoint on purpose") from None
    except CheckpointError:
        return DiskOffer(name=name, files=files)
    return DiskOffer(
        name=name,
        files=tuple(file for file in files if file not in damaged),
        content=checkpoint.manifest.content,
        needs=checkpoint.manifest.needs,
        resume=_resume(checkpoint.manifest, place.location, options, life),
    )


def _choose(options: RunOptions, place: str, *, is_thorough: bool) -> Choice:
    at = place_at(place)
    look = partial(_read_through, options) if is_thorough else quick
    return choose([at], look, _left_behind(options, at))


def _read_through(options: RunOptions, checkpoint: Checkpoint) -> list[str]:
    """Read every byte of the checkpoint, and return its problems."""
    with _shown(options, checkpoint) as shown:
        return thorough(shown)


@contextmanager
def _shown(options: RunOptions, checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """Yield the checkpoint so that reading it shows progress."""
    if not options.output.shows_progress:
        yield checkpoint
        return
    with closing(ProgressBar(f"checking {checkpoint.manifest.name}", checkpoint.size_here_bytes)) as bar:
        yield replace(checkpoint, on_bytes=bar.advance)


def _left_behind(options: RunOptions, place: CheckpointPlace) -> list[str]:
    """Return checkpoints of other jobs that are newer than the one to which this job was told to go back."""

    def is_ours(name: str) -> bool:
        try:
            return Checkpoint.open([place], name).manifest.job == options.job
        except CheckpointError:
            return False

    # A disk may be slow to answer.
    return left_behind(visible(place), options.resume.named, is_ours) if options.resume.named else []


def _lives_before(options: RunOptions, name: str, life: int) -> int:
    """Return the offset that numbers this job's lives above those in the directory that it writes to."""
    there = visible(place_at(options.checkpoint_dir)) if options.checkpoint_dir is not None else []
    return lives_before(there, name, life)


def _what_is_left(options: RunOptions, resume: Resume) -> str:
    """Return a clause about newer checkpoints that stay in the directory that the job writes to, or ""."""
    left = _left_behind(options, place_at(options.checkpoint_dir)) if options.checkpoint_dir is not None else []
    return f"; {left[-1]} is left behind: what this job writes counts as newer" if left else ""


def _resume(manifest: Manifest, place: str, options: RunOptions, life: int) -> Resume:
    scaler = manifest.counters.get("scaler") or {}
    return Resume(
        place=place if "://" in place else str(Path(place).absolute()),
        name=manifest.name,
        step=manifest.step,
        job=manifest.job,
        scale=scaler.get("scale"),
        clean_steps=scaler.get("clean_steps", 0),
        spec=manifest.spec,
        changes=manifest.changes,
        accepts_changes=options.resume.accepts_changes,
        lives_before=_lives_before(options, manifest.name, life),
    )


def _sentence(resume: Resume) -> str:
    if resume.step < 0:
        return f"the job starts with the parameters of {resume}"
    return f"the job goes on after step {resume.step}, from {resume}"
