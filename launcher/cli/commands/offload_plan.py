"""Command `elastrain offload plan`: predict the time of a step with other memory limits, drives or host memory.

The prediction comes from a replay of plans.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastrain.errors import ConfigError
from elastrain.launcher.cli.options.grouped import grouped
from elastrain.launcher.cli.options.job_options import size_bytes
from elastrain.launcher.shared.console import print_table
from elastrain.launcher.shared.process_environment import missing_extra
from elastrain.offload.errors import OffloadConfigError

if TYPE_CHECKING:
    from elastrain.offload.planning.plan_values import Tier
    from elastrain.offload.planning.step_profile import StepProfile
    from elastrain.offload.report.what_if import Prices, Question, WhatIf

MOST_DRIVES = 64
HOST_BANDWIDTH = 20e9
"""Bytes per second of host memory across a bus, in each direction, if the profile has no measurement."""


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
    rating: Annotated[
        str | None, typer.Option("--rating", help="What one drive may be written in its life, as 1200T.")
    ] = None

    def question(self, profile: StepProfile) -> Question:
        """Return the options as values for the replay. Raises ConfigError if one is not understood."""
        from elastrain.offload.report.what_if import Question

        memory = None if self.memory is None else [size_bytes(each, "--memory") for each in self.memory.split(",")]
        return Question(
            limits_bytes=(profile.limit_bytes,) if memory is None else tuple(memory),
            counts=tuple(_count(each) for each in self.drives.split(",")),
            drive=_drive(self.drive, profile),
            host=None if self.host_memory is None else _host(size_bytes(self.host_memory, "--host-memory"), profile),
            rating_bytes=rating_bytes(self.rating),
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

    profile = _read(file)
    found = what_if(profile.seen, flags.question(profile))
    if all(each.refused for each in found):
        raise ConfigError(f"no plan is possible: {found[0].refused}")
    if as_json:
        print(json.dumps({"answers": [_plain(each) for each in found]}))
    else:
        print_table(COLUMNS, [row(each) for each in found])
    return 0


def show_plan(file: Path, plot: Path | None, rating: str | None, *, as_json: bool) -> int:
    """Print the plan of a profile beside what happened. Returns the exit code."""
    from elastrain.offload.planning import step_profile
    from elastrain.offload.report import plan_picture, plan_report, recording_report

    profile, rated = _read(file), rating_bytes(rating)
    if plot is not None:
        plotted(partial(plan_picture.draw, profile), plot)
    if as_json:
        print(step_profile.encode(profile).decode())
        return 0
    seen = plan_report.happened(profile.seen.points, len(profile.tiers))
    print(plan_report.render(profile.plan, seen, profile.tiers, profile.limit_bytes, rated))
    if profile.recording is not None:
        print("\n" + recording_report.render(profile.recording))
    return 0


def plotted(draw: Callable[[Path], None], file: Path) -> None:
    """Draw a picture into the file. Raises ConfigError if it cannot be written."""
    try:
        draw(file)
    except ModuleNotFoundError as error:
        raise missing_extra("a picture", "plot", error) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the picture cannot be written to {file}: {error}") from None


def _read(file: Path) -> StepProfile:
    from elastrain.offload.planning import step_profile

    try:
        return step_profile.read(file)
    except OffloadConfigError as error:
        raise ConfigError(str(error)) from None


def rating_bytes(text: str | None) -> float | None:
    """Return --rating in bytes, or None if it was not given. Raises ConfigError."""
    return None if text is None else float(size_bytes(text, "--rating"))


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,3}", text) or int(text) > MOST_DRIVES:
        raise ConfigError(f"--drives {text!r}: write whole numbers from 1 to {MOST_DRIVES}, such as 1,2,4")
    return int(text)


def _drive(text: str | None, profile: StepProfile) -> Tier:
    from elastrain.offload.planning.plan_values import Tier

    if text is None:
        measured = next((each for each in profile.tiers if not each.is_memory), None)
        if measured is None:
            raise ConfigError("the profile has no drive: say how fast one is, such as --drive 6.5/3.5")
        return measured
    found = re.fullmatch(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)", text)
    if found is None or not min(float(found[1]), float(found[2])) > 0:
        raise ConfigError(f"--drive {text!r}: write GB/s of reads and of writes, both above zero, such as 6.5/3.5")
    return Tier(name="drive", read_bytes_per_s=float(found[1]) * 1e9, write_bytes_per_s=float(found[2]) * 1e9)


def _host(capacity_bytes: int, profile: StepProfile) -> Tier:
    from elastrain.offload.planning.plan_values import Tier

    measured = next((each for each in profile.tiers if each.is_memory), None)
    return Tier(
        name="host memory",
        read_bytes_per_s=HOST_BANDWIDTH if measured is None else measured.read_bytes_per_s,
        write_bytes_per_s=HOST_BANDWIDTH if measured is None else measured.write_bytes_per_s,
        capacity_bytes=capacity_bytes,
        duplex=True,
        is_memory=True,
    )


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


def _plain(found: WhatIf) -> dict[str, object]:
    """Return the answer as JSON values: unknown and infinite values become null."""
    return {name: None if value == float("inf") else value for name, value in asdict(found).items()}
