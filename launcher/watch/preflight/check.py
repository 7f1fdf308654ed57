"""The result of one check before a start."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StartVerdict(StrEnum):
    """Meaning of a result for a job."""

    OK = "ok"
    WARNS = "warns"
    """A job starts, and may be slow or meet a limit later."""
    STOPS = "stops"
    """A job would not start, or would end."""


@dataclass(frozen=True, kw_only=True)
class StartCheck:
    """A result: what was looked at, what was found, and what to do about it."""

    name: str
    verdict: StartVerdict
    found: str
    advice: str = ""


def judged(name: str, found: str, *, stops: bool = False, warns: bool = False, advice: str = "") -> StartCheck:
    """Return the result. The advice is kept only where something is wrong."""
    verdict = StartVerdict.STOPS if stops else StartVerdict.WARNS if warns else StartVerdict.OK
    return StartCheck(name=name, verdict=verdict, found=found, advice=advice if stops or warns else "")
