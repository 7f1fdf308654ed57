"""What a job starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from elastrain.launcher.run_options import AUTO, StartWish


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

    def wish(self) -> StartWish:
        return StartWish(source=self.resume, accepts_changes=self.accept_changes)
