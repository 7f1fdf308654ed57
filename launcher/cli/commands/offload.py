"""Command `elastrain offload show`: report what offloading did in a run that is alive or has ended.

It shows memory, the place of each storage, stalls and wear.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from elastrain.errors import ConfigError
from elastrain.launcher.cli.commands.offload_plan import plotted, show_plan
from elastrain.launcher.shared import rundir
from elastrain.launcher.shared.console import RunOption, one_of, print_table
from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.planning import profile
from elastrain.offload.planning.profile import Profile
from elastrain.offload.report import plot as picture
from elastrain.offload.report import show


def show_offload(
    run: Annotated[
        str | None, typer.Argument(help="The run's folder or job id, or a profile's file; default: the newest run.")
    ] = None,
    named: RunOption = None,
    member: Annotated[str | None, typer.Option("--member", help="Details of this member; default: the first.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Also draw the last pass, what is where, stalls and wear, as .png, .svg or .pdf."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, a key per member.")] = False,
    rating: Annotated[
        str | None,
        typer.Option(
            "--rating", help="For the profile of a plan: what one drive may be written in its life, as 1200T."
        ),
    ] = None,
) -> int:
    """Show memory over one iteration, what is in memory and what on disk, stalls, and the wear of the drives.

    For a file written by `training.save_profile`: show the plan beside what happened.
    """
    chosen_run = one_of(run, named)
    if chosen_run is not None and _is_of_a_plan(Path(chosen_run)):
        return show_plan(Path(chosen_run), plot, rating, as_json=as_json)
    found = _profiles(chosen_run)
    if member is not None and member not in found:
        raise ConfigError(f"there is no profile of {member!r}: there are {', '.join(found)}")
    chosen = {member: found[member]} if member is not None else found
    if plot is not None:
        plotted(partial(picture.draw, chosen), plot)
    if as_json:
        print(json.dumps({name: profile.as_data(each) for name, each in chosen.items()}))
        return 0
    if len(chosen) > 1:
        print_table(show.OVERVIEW, [show.overview(name, each) for name, each in chosen.items()])
        print()
        print_table(show.DRIVES, [show.drive_row(each) for each in show.drives(chosen)])
        print()
    name, first = next(iter(chosen.items()))
    print(f"member    {name}\n{show.render(first)}")
    return 0


def _profiles(run: str | None) -> dict[str, Profile]:
    """Return the profile of each member, in the members' order. Raises ConfigError if there is none."""
    if run is not None and rundir.is_file(Path(run)):
        files, where = [Path(run)], Path(run)
    else:
        where = rundir.find(run).offload
        files = sorted(where.glob("*.json"), key=lambda file: (len(file.stem), file.stem))
    if not files:
        raise ConfigError(f"{where} holds no profile: the run did not offload, or has not finished a pass yet")
    try:
        return {file.stem: profile.read(file) for file in files}
    except OffloadConfigError as error:
        raise ConfigError(str(error)) from None


def _is_of_a_plan(path: Path) -> bool:
    from elastrain.offload.planning import step_profile

    return rundir.is_file(path) and step_profile.is_one(path)
