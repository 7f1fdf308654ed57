"""Where and when a job writes durable checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from elastrain.base.checkpoints import LAYOUTS, LOCAL, SHARED, CheckpointOptions, parse_every
from elastrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CheckpointFlags:
    """Without a directory there are none."""

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
        """Raises ConfigError."""
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
        if not folder:
            raise ConfigError("--checkpoint-dir: it is empty: name a folder or a URL")
        if "://" not in folder:
            return str(Path(folder).absolute())
        if self.checkpoint_layout == LOCAL:
            raise ConfigError(
                f"--checkpoint-dir {folder}: no local disk is at an address: use --checkpoint-layout shared"
            )
        # Every member would write what the others cannot read, and each checkpoint would be called complete.
        if folder.startswith("memory://"):
            raise ConfigError(f"--checkpoint-dir {folder}: each process has its own: name a folder or a store's URL")
        return folder

    def _age_s(self) -> float | None:
        """Raises ConfigError."""
        if self.keep_for is None:
            return None
        try:
            _, seconds = parse_every(self.keep_for)
        except ValueError:
            seconds = 0.0
        if not seconds:
            raise ConfigError(f"--keep-for {self.keep_for!r}: write a time such as 30m, 12h or 7d")
        return seconds
