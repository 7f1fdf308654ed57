"""What a job starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from elastrain.launcher.run_options import AUTO, NONE, StartWish


@dataclass(frozen=True, kw_only=True)
class ResumeFlags:
    """A checkpoint, or nothing."""

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
        """That the option names, or that a checkpoint it names lies in."""
        if self.resume in (AUTO, NONE) or not self.resume:
            return None
        from elastrain.snapshot.durable.manifest import place_in_time

        path = Path(self.resume).absolute()
        return str(path.parent if place_in_time(path.name) else path)

    def wish(self) -> StartWish:
        return StartWish(source=self.resume, accepts_changes=self.accept_changes)
