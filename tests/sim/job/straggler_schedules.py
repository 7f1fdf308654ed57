"""Schedules of jobs that are long enough for a slow member to lose its share of the runs, and then its place."""

from __future__ import annotations

import random

from tests.sim.job import schedule as sc
from tests.sim.job.schedule import AnyFault, Schedule


def draw_stragglers(seed: int) -> Schedule:
    """The schedule of this seed: one or two members are slow, and other faults come while they are judged."""
    rng = random.Random(f"stragglers {seed}")
    nodes, workers = rng.choice(((1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (3, 1), (4, 1)))
    sizes = Schedule(
        seed=seed,
        nodes=nodes,
        workers=workers,
        backups=rng.choice((0, 1, 1, 2)),
        steps=rng.choice((50, 70, 90)),
        runs=nodes * workers * rng.choice((1, 1, 2)),
        one_host=rng.random() < 0.5,
    )
    faults: list[AnyFault] = []
    for at_s in [rng.uniform(3, 8) for _ in range(rng.choice((1, 1, 2)))]:
        factor, for_s = rng.choice((1.5, 2.5, 4.0, 8.0)), rng.choice((20.0, 40.0, 80.0))
        faults.append(sc.Straggle(at_s=round(at_s, 3), who=rng.randrange(8), factor=factor, for_s=for_s))
        faults += [_beside(rng, round(at_s + rng.uniform(10, 40), 3), sizes) for _ in range(rng.choice((0, 1, 2)))]
    return sc.replace(sizes, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _beside(rng: random.Random, at_s: float, sizes: Schedule) -> AnyFault:
    more = (sc._kills, sc._kills, sc._nets, sc._stores) if sizes.nodes > 1 else (sc._kills,)
    return rng.choice(more)(rng, at_s, sizes)
