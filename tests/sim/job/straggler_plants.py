"""Bugs planted into what is done about slow members: jobs that have some must show each."""

from __future__ import annotations

from typing import Any

from elastrain.launcher.core.cluster import Cluster
from tests.sim.job.plants import Plant, Rule, planter
from tests.sim.job.straggler_schedules import draw_stragglers

PLANTS: dict[str, Plant] = {}


_plant = planter(PLANTS, draw=draw_stragglers, kind="stragglers", only=lambda schedule: True)


@_plant(Cluster, "is_needed")
def ends_whom_the_job_needs(rule: Rule, cluster: Cluster, *given: Any, **options: Any) -> bool:
    """A slow member that alone holds something stays."""
    return False
