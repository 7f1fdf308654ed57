"""What the launcher asks of a job's durable checkpoints: which one to start from, and how far the newest goes.

No torch is imported for it.
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
    """What a job starts from, and one line that says so; empty where nobody has to be told."""

    resume: Resume | None
    sentence: str = ""
    offers: tuple[DiskOffer, ...] = ()
    """What this node's own disk has, where disks are local: all nodes choose together."""
    named: str = ""
    """What the command names then, or a later life needs; empty where the newest is taken, if there is one."""


def newest_step(options: RunOptions) -> int | None:
    """None where no checkpoint was asked for, or none is complete. Looks at sizes and marks, reads no shard.

    Where disks are local it is the newest that this node has a part of: whether it is complete all nodes say together.
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
    """Write something where checkpoints are to be, and hold it for this job, before any worker starts.

    The kernel lets go of it with this process. A job that has written nothing there leaves nothing there. Raises
    ConfigError where it cannot be written, is a living job's, has checkpoints beside which the job may not write, or
    has them where the job would not see them. `is_of_simulated`: all simulated nodes of the job are here.
    """
    if options.checkpoint_dir is None:
        yield
        return
    if overlooked := _overlooked(options, options.checkpoint_dir, is_of_simulated=is_of_simulated):
        raise ConfigError(f"--checkpoint-dir {options.checkpoint_dir}: {overlooked}, or begin anew with --resume none")
    is_new = False
    with suppress(CheckpointError):  # `_claimed` says it
        is_new = not place_at(options.checkpoint_dir).exists()
    held = _claimed(options)
    try:
        yield
    finally:
        # What is written is whole; what cannot be tidied up now is in nobody's way.
        with suppress(CheckpointError):
            if held is not None:
                held.withdraw()
            if is_new and not (place := place_at(options.checkpoint_dir)).names():
                place.remove("")


def _overlooked(options: RunOptions, folder: str, *, is_of_simulated: bool) -> str:
    """Where the newest is to be taken, and there is none, but for the folders that simulated nodes have: in words."""
    assert options.checkpoints is not None
    if options.resume.source != AUTO:
        return ""
    try:
        place = place_at(folder)
        nodes = filter(_SIMULATED.fullmatch, place.names())
        simulated = [name for name in nodes if visible(place_at(f"{folder}/{name}"))]
        is_here = bool(visible(place))
    except CheckpointError:  # whoever uses it says it
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
        # Of local disks, each node holds its own.
        held = hold_for(place, options.job)
        return claim(place, options.job) if held is None and options.resume.source == NONE else held
    except TakenError as error:
        raise ConfigError(f"--checkpoint-dir: {error}") from None
    except CheckpointError as error:
        raise ConfigError(f"--checkpoint-dir {options.checkpoint_dir}: no checkpoint can be written: {error}") from None


def find_start(options: RunOptions, life: int = 1) -> Beginning:
    """The checkpoint that the options ask for. Raises ConfigError where one that was named is not good, and where the
    job is to begin anew beside checkpoints that are there: later lives would take these for its own.

    life: the number of the job's life that starts from it.
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
    """A checkpoint's own folder, or a directory of them, of which the newest counts: it must be good."""
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
    """What lies in this node's part of the source; a checkpoint's name may be given, too."""
    place, asked = place_at(source), options.resume.source
    named = options.resume.named if asked != AUTO and place_in_time(options.resume.named) else ""
    left = _left_behind(options, place)
    names = [name for name in place.names() if place_in_time(name) and named in ("", name) and name not in left]
    offers = [_offer(options, place, name, life) for name in names[-_OFFERS_MAX:]]
    sentence = "there is no checkpoint on the disks of this job's nodes yet: the job starts anew"
    # A later life is there because checkpoints are: nodes that have none of them do not begin the job anew.
    least = "" if life == 1 else "a checkpoint of this job"
    return Beginning(resume=None, sentence=sentence, offers=tuple(offers), named=least if asked == AUTO else asked)


def _offer(options: RunOptions, place: CheckpointPlace, name: str, life: int) -> DiskOffer:
    """Of one checkpoint: its parts that lie here and are good."""
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
    """What is wrong with it, by every byte."""
    with _shown(options, checkpoint) as shown:
        return thorough(shown)


@contextmanager
def _shown(options: RunOptions, checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """The same one; whoever reads all of it shows how far that is."""
    if not options.output.shows_progress:
        yield checkpoint
        return
    with closing(ProgressBar(f"checking {checkpoint.manifest.name}", checkpoint.size_here_bytes)) as bar:
        yield replace(checkpoint, on_bytes=bar.advance)


def _left_behind(options: RunOptions, place: CheckpointPlace) -> list[str]:
    """What others have written after the checkpoint that this job was told to go back to."""

    def is_ours(name: str) -> bool:
        try:
            return Checkpoint.open([place], name).manifest.job == options.job
        except CheckpointError:
            return False

    # A disk may be slow to answer.
    return left_behind(visible(place), options.resume.named, is_ours) if options.resume.named else []


def _lives_before(options: RunOptions, name: str, life: int) -> int:
    """What lifts the job's lives above those in the directory that it writes to."""
    there = visible(place_at(options.checkpoint_dir)) if options.checkpoint_dir is not None else []
    return lives_before(there, name, life)


def _what_is_left(options: RunOptions, resume: Resume) -> str:
    """Newer ones in the directory that the job writes to stay there, until they are old."""
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
