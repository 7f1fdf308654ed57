"""Commands `elastrain offload show` and `elastrain offload plan`, which read profiles of offloading.

The first one reports what happened in a run that is alive or has ended: memory, the place of each storage, stalls and
wear. The second one predicts a step with other memory limits, drives or host memory, by a replay of plans.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from elastrain.errors import ConfigError
from elastrain.launcher.cli.options.grouped import grouped
from elastrain.launcher.cli.options.job_options import size_bytes
from elastrain.launcher.shared import rundir
from elastrain.launcher.shared.console import RunOption, one_of, print_table
from elastrain.launcher.shared.process_environment import missing_extra
from elastrain.offload.planning import profile
from elastrain.offload.planning.plan_values import Tier
from elastrain.offload.planning.profile import Profile, StepProfile
from elastrain.offload.report import plot as picture
from elastrain.offload.report import show

if TYPE_CHECKING:
    from elastrain.offload.report.what_if import Prices, Question

MOST_DRIVES = 64
HOST = Tier(name="host memory", read_bytes_per_s=20e9, write_bytes_per_s=20e9, duplex=True, is_memory=True)
"""Host memory across a bus, if the profile has no measurement of it."""
Rating = Annotated[str | None, typer.Option("--rating", help="What one drive may be written in its life, as 1200T.")]


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
    rating: Rating = None,
) -> int:
    """Show memory over one iteration, what is in memory and what on disk, stalls, and the wear of the drives.

    For a file written by `training.save_profile`: show the plan beside what happened. --rating is for such a file.
    """
    found, rated = _profiles(one_of(run, named)), _rating_bytes(rating)
    if member is not None and member not in found:
        raise ConfigError(f"there is no profile of {member!r}: there are {', '.join(found)}")
    chosen = {member: found[member]} if member is not None else found
    passes = {name: each for name, each in chosen.items() if isinstance(each, Profile)}
    first = next(iter((passes or chosen).values()))
    if plot is not None:
        _plotted(
            partial(picture.draw, passes) if isinstance(first, Profile) else partial(picture.draw_step, first), plot
        )
    if isinstance(first, StepProfile):
        print(profile.encode(first).decode() if as_json else show.render_step(first, rated))
    elif as_json:
        print(msgspec.json.encode({name: profile.as_data(each) for name, each in passes.items()}).decode())
    else:
        print(show.render(passes))
    return 0


@dataclass(frozen=True, kw_only=True)
class WhatIfFlags:
    """Options for what should differ from the recorded step."""

    memory: Annotated[
        str | None, typer.Option("--memory", help="Limits, as 24G,48G; default: the one that the step ran with.")
    ] = None
    drive: Annotated[
        str | None,
        typer.Option("--drive", help="GB/s that one drive reads and writes, as 6.5/3.5; default: as measured."),
    ] = None
    drives: Annotated[str, typer.Option("--drives", help="How many such drives there are, as 1,2,4.")] = "1"
    host_memory: Annotated[
        str | None,
        typer.Option("--host-memory", help="Host memory that pieces may take besides, as 32G; default: none."),
    ] = None
    price: Annotated[
        str | None,
        typer.Option(
            "--price",
            help="What an hour costs of the machine, of a GiB of memory, of a drive, of a GiB of host memory, as "
            "machine=2.5,memory=0.01,drive=0.03,host=0.002; what is left out costs nothing.",
        ),
    ] = None
    rating: Rating = None

    def question(self, step: StepProfile) -> Question:
        """Return the options as values for the replay. Raises ConfigError if one is not understood."""
        from elastrain.offload.report.what_if import Question

        memory = None if self.memory is None else [size_bytes(each, "--memory") for each in self.memory.split(",")]
        return Question(
            limits_bytes=(step.limit_bytes,) if memory is None else tuple(memory),
            counts=tuple(_count(each) for each in self.drives.split(",")),
            drive=_drive(self.drive, step),
            host=None if self.host_memory is None else _host(size_bytes(self.host_memory, "--host-memory"), step),
            rating_bytes=_rating_bytes(self.rating),
            prices=None if self.price is None else _prices(self.price),
        )


@grouped
def plan_offload(
    file: Annotated[Path, typer.Argument(help="What `training.save_profile(file)` left.", metavar="PROFILE")],
    flags: WhatIfFlags,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> int:
    """Say how fast the step of PROFILE would be within other limits and with other drives.

    Plans are made and replayed; nothing is trained.
    """
    from elastrain.offload.report.what_if import COLUMNS, row, what_if

    step = profile.read(file)
    if not isinstance(step, StepProfile):
        raise ConfigError(f"{file} has no step to plan for: name a file that `training.save_profile(file)` has written")
    found = what_if(step.seen, flags.question(step))
    if all(each.refused for each in found):
        raise ConfigError(f"no plan is possible: {found[0].refused}")
    if as_json:
        print(msgspec.json.encode({"answers": found}).decode())  # infinite values become null
    else:
        print_table(COLUMNS, [row(each) for each in found])
    return 0


def _profiles(run: str | None) -> dict[str, Profile | StepProfile]:
    """Return the profile of each member, in the members' order. Raises ConfigError if there is none."""
    if run is not None and rundir.is_file(Path(run)):
        files, where = [Path(run)], Path(run)
    else:
        where = rundir.find(run).offload
        files = sorted(where.glob("*.json"), key=lambda file: (len(file.stem), file.stem))
    if not files:
        raise ConfigError(f"{where} holds no profile: the run did not offload, or has not finished a pass yet")
    return {file.stem: profile.read(file) for file in files}


def _plotted(draw: Callable[[Path], None], file: Path) -> None:
    """Draw a picture into the file. Raises ConfigError if it cannot be written."""
    try:
        draw(file)
    except ModuleNotFoundError as error:
        raise missing_extra("a picture", "plot", error) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the picture cannot be written to {file}: {error}") from None


def _rating_bytes(text: str | None) -> float | None:
    return None if text is None else float(size_bytes(text, "--rating"))


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,3}", text) or int(text) > MOST_DRIVES:
        raise ConfigError(f"--drives {text!r}: write whole numbers from 1 to {MOST_DRIVES}, such as 1,2,4")
    return int(text)


def _drive(text: str | None, step: StepProfile) -> Tier:
    if text is None:
        measured = next((each for each in step.tiers if not each.is_memory), None)
        if measured is None:
            raise ConfigError("the profile has no drive: say how fast one is, such as --drive 6.5/3.5")
        return measured
    found = re.fullmatch(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)", text)
    if found is None or not min(float(found[1]), float(found[2])) > 0:
        raise ConfigError(f"--drive {text!r}: write GB/s of reads and of writes, both above zero, such as 6.5/3.5")
    return Tier(name="drive", read_bytes_per_s=float(found[1]) * 1e9, write_bytes_per_s=float(found[2]) * 1e9)


def _host(capacity_bytes: int, step: StepProfile) -> Tier:
    measured = next((each for each in step.tiers if each.is_memory), HOST)
    return replace(measured, name=HOST.name, capacity_bytes=capacity_bytes, latency_s=0.0, duplex=True)


def _prices(text: str) -> Prices:
    from elastrain.offload.report.what_if import Prices

    names = [each.name for each in fields(Prices)]
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in names or name in found or not re.fullmatch(r"\d+(\.\d+)?", value):
            raise ConfigError(
                f"--price {part!r}: write {', '.join(f'{each}=NUMBER' for each in names)}, each once at most"
            )
        found[name] = float(value)
    if not any(found.values()):
        raise ConfigError(f"--price {text!r}: nothing costs anything: give one price above zero")
    return Prices(**found)
