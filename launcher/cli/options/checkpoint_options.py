"""Options for durable checkpoints: where and when a job writes them, and which one it starts from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from elastrain.base.checkpoint_settings import LAYOUTS, LOCAL, SHARED, CheckpointOptions, parse_every
from elastrain.errors import ConfigError
from elastrain.launcher.start.run_options import AUTO, NONE, StartWish


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Options for writing checkpoints. Without --checkpoint-dir, none are written."""

    heading: ClassVar = "Checkpoints"

    checkpoint_dir: Annotated[
        str | None,
        typer.Option("--checkpoint-dir", help="Folder or URL for durable checkpoints; the same for all nodes."),
    ] = None
    checkpoint_every: Annotated[
        str | None,
        typer.Option("--checkpoint-every", help="Steps, or a time such as 5m, from one checkpoint to the next."),
    ] = None
    checkpoint_layout: Annotated[
        str,
        typer.Option(
            "--checkpoint-layout",
            metavar="shared|local",
            help="shared: all nodes reach the same folder; local: each has a disk of its own there, with what its "
            "members hold.",
        ),
    ] = SHARED
    keep: Annotated[int, typer.Option("--keep", min=1, help="Checkpoints that are kept; older ones go.")] = 3
    keep_for: Annotated[
        str | None,
        typer.Option(
            "--keep-for", help="A time such as 12h or 7d: what is older goes, too, but never the newest good one."
        ),
    ] = None

    def checkpoints(self) -> CheckpointOptions | None:
        """Return the checked options, or None without --checkpoint-dir. Raises ConfigError."""
        if self.checkpoint_dir is None:
            if self.checkpoint_every is not None:
                raise ConfigError("--checkpoint-every: say where they are written, too, with --checkpoint-dir DIR")
            if self.checkpoint_layout != SHARED:
                raise ConfigError("--checkpoint-layout: say where the disks are, too, with --checkpoint-dir DIR")
            if self.keep_for is not None:
                raise ConfigError("--keep-for: say where checkpoints are written, too, with --checkpoint-dir DIR")
            return None
        if self.checkpoint_layout not in LAYOUTS:
            raise ConfigError(f"--checkpoint-layout {self.checkpoint_layout!r}: it is one of {', '.join(LAYOUTS)}")
        try:
            steps, seconds = parse_every(self.checkpoint_every) if self.checkpoint_every is not None else (0, 0.0)
        except ValueError as error:
            raise ConfigError(f"--checkpoint-every {error}") from None
        place = self._place(self.checkpoint_dir)
        return CheckpointOptions(
            place=place,
            every_steps=steps,
            every_s=seconds,
            keep=self.keep,
            keep_for_s=self._age_s(),
            layout=self.checkpoint_layout,
        )

    def _place(self, folder: str) -> str:
        """Return the place with an absolute path, because a script may change its working directory.

        Raises ConfigError.
        """
        if not folder.strip():
            raise ConfigError("--checkpoint-dir: it is empty: name a folder or a URL")
        protocol, is_url, path = folder.partition("://")
        if not is_url:
            return _absolute(folder)
        if not protocol or not path:
            raise ConfigError(f"--checkpoint-dir {folder}: it is no URL: write PROTOCOL://PATH")
        if self.checkpoint_layout == LOCAL:
            raise ConfigError(
                f"--checkpoint-dir {folder}: no local disk is at an address: use --checkpoint-layout shared"
            )
        # Members could not read each other's parts, although each checkpoint would be called complete.
        if folder.startswith("memory://"):
            raise ConfigError(f"--checkpoint-dir {folder}: each process has its own: name a folder or a store's URL")
        return f"{protocol}://{_absolute(path)}" if protocol in ("file", "local") else folder

    def _age_s(self) -> float | None:
        """Return --keep-for in seconds, or None if it was not given. Raises ConfigError."""
        if self.keep_for is None:
            return None
        try:
            _, seconds = parse_every(self.keep_for)
        except ValueError:
            seconds = 0.0
        if not seconds:
            raise ConfigError(f"--keep-for {self.keep_for!r}: write a time such as 30m, 12h or 7d")
        return seconds


def _absolute(folder: str) -> str:
    """Return the absolute path of a folder, with `~` expanded. Raises ConfigError."""
    try:
        path = str(Path(folder).expanduser().absolute())  # a shell does not expand `--checkpoint-dir=~/x`
    except RuntimeError:
        raise ConfigError(f"--checkpoint-dir {folder}: no user here has that name: write the whole path") from None
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", path):
        raise ConfigError(f"--checkpoint-dir {folder!r}: a control character, or a byte that is no UTF-8: rename it")
    return path


@dataclass(frozen=True, kw_only=True)
class ResumeFlags:
    """Options that choose the checkpoint to start from."""

    heading: ClassVar = "Going on from a checkpoint"

    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="auto|none|PATH",
            help="auto: go on from the newest good checkpoint in --checkpoint-dir, if there is one; none: start anew; "
            "PATH: go on from this checkpoint, or from the newest in this directory.",
        ),
    ] = AUTO
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Go on although model, optimizer, batch or seed are not those of the job that wrote the checkpoint.",
        ),
    ] = False

    def folder(self) -> str | None:
        """Return the folder that --resume names, or the parent of a named checkpoint; None for auto and none."""
        if self.resume in (AUTO, NONE) or not self.resume:
            return None
        from elastrain.snapshot.durable.manifest import place_in_time

        path = Path(self.resume).absolute()
        return str(path.parent if place_in_time(path.name) else path)

    def wish(self) -> StartWish:
        """Return the options as values for the start of the job."""
        return StartWish(source=self.resume, accepts_changes=self.accept_changes)
