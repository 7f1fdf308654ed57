"""The command line `elastrain COMMAND …`. Each command has a file in `commands/`; this file registers them.

Errors end in one sentence on standard error. The exit code is 2 for wrong input, 1 for later failures. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Annotated, ParamSpec

import typer

from elastrain.errors import ConfigError, ElastrainError
from elastrain.launcher.cli.commands import (
    chaos,
    checkpoint,
    doctor,
    inject,
    launch,
    launch_slurm,
    offload,
    operating,
    report,
    run,
    status,
)
from elastrain.launcher.cli.options.grouped import HeadedCommand
from elastrain.launcher.shared.console import say
from elastrain.offload.errors import OffloadConfigError
from elastrain.version import __version__

_HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    context_settings=_HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
P = ParamSpec("P")


def _tell_version(asked: bool) -> None:
    """Print the version and exit, before any command is parsed."""
    if asked:
        typer.echo(f"elastrain {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")]


@app.callback()
def elastrain(version: Version = False) -> None:
    """Elastic, fault-tolerant training for PyTorch."""


def _exits(command: Callable[P, int]) -> Callable[P, None]:
    """Return the command as typer needs it: the result becomes the exit code, and user errors become one sentence."""

    @wraps(command)
    def exiting(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except (ElastrainError, OffloadConfigError) as error:
            say(str(error))
            code = 2 if isinstance(error, ConfigError | OffloadConfigError) else 1
        raise typer.Exit(code)

    return exiting


# Short, because the list of commands cuts off a text that is longer than its line.
app.command(
    "run",
    cls=HeadedCommand,
    short_help="Run SCRIPT in workers; start again what dies.",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)(_exits(run.run))
app.command("status", short_help="Show members, progress, and what happened last.")(_exits(status.status))
app.command("top", short_help="Show that again and again, until the run ends.")(_exits(status.top))
app.command("report", short_help="Write the history of a run as one page.")(_exits(report.report))
app.command("ls", short_help="List the runs, the newest first.")(_exits(operating.list_runs))
app.command("logs", short_help="Print what members have written into files.")(_exits(operating.logs))
app.command("drain", short_help="Let a node hand over and leave.")(_exits(operating.drain))
app.command("stop", short_help="Write a last checkpoint and end all nodes.")(_exits(operating.stop))
app.command("doctor", cls=HeadedCommand, short_help="Check this machine, or a script, before a job.")(
    _exits(doctor.doctor)
)
app.command("chaos", short_help="Strike a job with faults drawn at random.")(_exits(chaos.chaos))
_free = {"ignore_unknown_options": True}
app.command("inject", short_help="Inject one fault into a job.", context_settings=_free)(_exits(inject.inject))

offload_app = typer.Typer(
    help="Memory on SSD: what happened, and what would.", no_args_is_help=True, rich_markup_mode=None
)
offload_app.command("show", short_help="Show memory, stalls and wear of the last step.")(_exits(offload.show_offload))
offload_app.command("plan", short_help="Say how fast other limits and drives would be.")(_exits(offload.plan_offload))
app.add_typer(offload_app, name="offload")

checkpoint_app = typer.Typer(help="Durable checkpoints.", no_args_is_help=True, rich_markup_mode=None)
checkpoint_app.command("ls", short_help="List the checkpoints, the newest first.")(_exits(checkpoint.list_checkpoints))
checkpoint_app.command("verify", short_help="Read every byte back and compare it.")(
    _exits(checkpoint.verify_checkpoints)
)
checkpoint_app.command("show", short_help="Show what is in a checkpoint.")(_exits(checkpoint.show_checkpoint))
checkpoint_app.command("export", short_help="Write files that plain PyTorch reads.")(
    _exits(checkpoint.export_checkpoint)
)
checkpoint_app.command("import", short_help="Make a checkpoint of a plain state dict.")(_exits(checkpoint.import_state))
app.add_typer(checkpoint_app, name="checkpoint")

launch_app = typer.Typer(help="Files that start a job in a cluster.", no_args_is_help=True, rich_markup_mode=None)
launch_app.command("kubernetes", cls=HeadedCommand, short_help="Write manifests for Kubernetes.")(
    _exits(launch.kubernetes)
)
launch_app.command("slurm", cls=HeadedCommand, short_help="Write or submit a batch script for Slurm.")(
    _exits(launch_slurm.slurm)
)
app.add_typer(launch_app, name="launch")
