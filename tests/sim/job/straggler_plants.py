"""Bugs planted into what is done about slow members: jobs that have some must show each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastrain.launcher.core.cluster import Cluster
from tests.sim.job.plants import Plant, Rule
from tests.sim.job.straggler_schedules import draw_stragglers

PLANTS: dict[str, Plant] = {}


def _plant(part: Any, name: str) -> Callable[[Rule], Rule]:
    def register(planted: Rule) -> Rule:
        title = "".join(word.capitalize() for word in planted.__name__.split("_"))
        PLANTS[title] = Plant(
            title=title,
            rule=planted.__doc__ or "",
            part=part,
            name=name,
            planted=planted,
            only=lambda schedule: True,
            draw=draw_stragglers,
            kind="stragglers",
        )
        return planted

    return register


@_plant(Cluster, "is_needed")
def ends_whom_the_job_needs(rule: Rule, cluster: Cluster, *given: Any, **options: Any) -> bool:
    """A slow member that alone holds something stays."""
    return False
