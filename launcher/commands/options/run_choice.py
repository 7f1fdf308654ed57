"""Which run a command is about: a folder or a job id, as an argument or after --run. By default it is the newest."""

from __future__ import annotations

from typing import Annotated

import typer

from elastrain.errors import ConfigError

RunArgument = Annotated[str | None, typer.Argument(help="The run's folder or job id; default: the newest.")]
RunOption = Annotated[str | None, typer.Option("--run", help="The run's folder or job id; default: the newest.")]


def one_of(argument: str | None, option: str | None) -> str | None:
    """The run that was named, in whichever way. Raises ConfigError for two that differ."""
    if argument is not None and option is not None and argument != option:
        raise ConfigError(f"two runs are named, {argument!r} and --run {option!r}: name one")
    return option if argument is None else argument
