"""The command line: `elastrain COMMAND …`. One file per command in `commands/`; here they are only put together.

Errors end in one sentence on standard error: exit code 2 for wrong input, 1 for what went wrong later. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import typer

from elastrain.errors import ConfigError, ElastrainError
from elastrain.launcher.commands import chaos, checkpoint, doctor, inject, offload, offload_plan, run, status
from elastrain.launcher.say import say

app = typer.Typer(
    help="Elastic, fault-tolerant training for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
P = ParamSpec("P")


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="elastrain")


def _exits(command: Callable[P, int]) -> Callable[P, None]:
    """The command's return value becomes the exit code; the errors that users meet become one sentence."""

    @wraps(command)
    def exiting(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except ElastrainError as error:
            say(str(error))
            code = 2 if isinstance(error, ConfigError) else 1
        raise typer.Exit(code)

    return exiting


app.command("run", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})(_exits(run.run))
app.command("status")(_exits(status.status))
app.command("doctor")(_exits(doctor.doctor))
app.command("chaos")(_exits(chaos.chaos))
app.command("inject", context_settings={"ignore_unknown_options": True})(_exits(inject.inject))

offload_app = typer.Typer(
    help="Memory on SSD: what happened, and what would.", no_args_is_help=True, rich_markup_mode=None
)
offload_app.command("show")(_exits(offload.show_offload))
offload_app.command("plan")(_exits(offload_plan.plan_offload))
app.add_typer(offload_app, name="offload")

checkpoint_app = typer.Typer(help="Durable checkpoints.", no_args_is_help=True, rich_markup_mode=None)
checkpoint_app.command("ls")(_exits(checkpoint.list_checkpoints))
checkpoint_app.command("verify")(_exits(checkpoint.verify_checkpoints))
checkpoint_app.command("show")(_exits(checkpoint.show_checkpoint))
checkpoint_app.command("export")(_exits(checkpoint.export_checkpoint))
checkpoint_app.command("import")(_exits(checkpoint.import_state))
app.add_typer(checkpoint_app, name="checkpoint")
