"""Many schedules after one another, as tests and the experiment play them, each in its processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tests.sim.job.schedule import Schedule, draw
from tests.sim.job.world import World, outcome

PIECE = 25
"""Schedules of one call."""


def simulate(first: int, draw: Callable[[int], Schedule] = draw) -> tuple[Counter[str], list[tuple[int, str]]]:
    """How `PIECE` schedules ended, and (seed, sentence) of each in which something does not hold."""
    ended: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    for seed in range(first, first + PIECE):
        world = World(draw(seed))
        try:
            world.run()
        except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
            broken.append((seed, f"{type(error).__name__}: {error}"))
        else:
            ended[outcome(world)] += 1
        ended["schedules"] += 1
        ended["faults"] += world.faults.struck
    return ended, broken
