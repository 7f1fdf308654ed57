"""What tests of the agent's core have in common."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from elastrain.launcher.shared.job_values import JobConfig
from elastrain.launcher.shared.places import Least, NodePlaces, QuarantineRule
from elastrain.launcher.shared.times import HangTimes, JobTimes

_TIMES = {field.name for field in fields(JobTimes)}
_HANGS = {field.name for field in fields(HangTimes)}


def job_config(**settings: Any) -> JobConfig:
    """A job's configuration with its times among the other settings."""
    times = JobTimes(**{name: value for name, value in settings.items() if name in _TIMES})
    hangs = HangTimes(**{name: value for name, value in settings.items() if name in _HANGS})
    least = Least(nodes=settings.pop("nodes_min", 1), members=settings.pop("members_min", 1))
    rule: QuarantineRule | None = settings.pop("quarantine", None)
    places = NodePlaces(nodes=settings.pop("nodes_max", 1), spares=settings.pop("spares", 0), quarantine=rule)
    others = {name: value for name, value in settings.items() if name not in _TIMES | _HANGS}
    return JobConfig(**others, least=least, places=places, times=times, hangs=hangs)
