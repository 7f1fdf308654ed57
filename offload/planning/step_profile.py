"""The profile file of training within a memory limit: a measured step, its tiers, and the plan that was made from it.

`elastrain offload plan` makes other plans from it, without the model; `elastrain offload show` draws it. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastrain.base import line_files
from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.planning.orders import UpdateOrder
from elastrain.offload.planning.plan_search import SeenStep
from elastrain.offload.planning.plan_values import Plan, Tier
from elastrain.offload.planning.step_recording import Recording

KIND = "lifetimes"
"""Value of the field `kind`. Profiles of runs that move activations only do not have it."""
FORMAT = 1
_BEGIN = msgspec.json.encode({"kind": KIND})[:-1]


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """The profile of one process: its limit, its tiers, a measured step and the plan.

    `recording` is an operator-by-operator recording of one of its steps, or None.
    """

    limit_bytes: int
    tiers: tuple[Tier, ...]
    seen: SeenStep
    order: UpdateOrder
    plan: Plan
    recording: Recording | None = None

    def __post_init__(self) -> None:
        pieces, tiers = len(self.plan.program.pieces), len(self.tiers)
        if any(not 0 <= move.gap.piece < pieces for move in self.plan.moves):
            raise ValueError("a move is of a piece that the plan does not have")
        if any(not 0 <= share.tier < tiers for move in self.plan.moves for share in move.shares):
            raise ValueError("a piece lies on a tier that is not named")
        if len(self.plan.played.stalls_s) not in (0, len(self.plan.program.points)):
            raise ValueError("the plan's stalls are not one for each of its points")


class _StepFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a profile file."""

    kind: str
    format: int
    profile: StepProfile


class _KindOfProfile(msgspec.Struct, frozen=True):
    """The field that all kinds of profile files share. Other fields are ignored."""

    kind: str = ""


def encode(profile: StepProfile) -> bytes:
    """Return the profile as one JSON object."""
    return msgspec.json.encode(_StepFile(kind=KIND, format=FORMAT, profile=profile))


def write(file: Path, profile: StepProfile) -> None:
    """Write the file atomically. Raises OSError."""
    line_files.replace(file, encode(profile))


def is_one(file: Path) -> bool:
    """Return True if the file is a profile of this kind, in any format version. A truncated file counts, too."""
    try:
        data = file.read_bytes()
    except OSError:
        return False
    try:
        return msgspec.json.decode(data, type=_KindOfProfile).kind == KIND
    except (ValueError, RecursionError):
        return data.startswith(_BEGIN)


def read(file: Path) -> StepProfile:
    """Read a profile. Raises OffloadConfigError if the file holds no readable profile."""
    try:
        told = msgspec.json.decode(file.read_bytes(), type=_StepFile)
        if (told.kind, told.format) != (KIND, FORMAT):
            raise ValueError(f"it is no {KIND!r} of format {FORMAT}")
    except (OSError, ValueError, RecursionError) as error:
        raise OffloadConfigError(
            f"{file} holds no profile of a step that can be read ({error}): `training.save_profile(file)` writes one"
        ) from None
    return told.profile
