"""Schedules in which nodes are out of reach for long, often until the job has ended, and the store loses its data."""

from __future__ import annotations

import random

from tests.sim.job import schedule as sc
from tests.sim.job.schedule import AnyFault, Schedule


def draw_isolations(seed: int) -> Schedule:
    """The schedule of this seed: short jobs, long isolations, and other faults close upon them."""
    rng = random.Random(f"isolations {seed}")
    sizes = Schedule(
        seed=seed,
        nodes=rng.choice((2, 3, 3, 3, 4)),
        workers=rng.choice((1, 1, 1, 2)),
        backups=rng.choice((0, 1, 1, 2)),
        steps=rng.choice((1, 1, 2, 2, 3, 4)),
        runs=rng.choice((1, 2, 3)),
        one_host=rng.random() < 0.3,
        slow_store=rng.choice((-1, -1, -1, 0, 1)),
        used_store=rng.random() < 0.7,
    )
    at_s = round(rng.uniform(0.5, 2.0 + 1.2 * sizes.steps), 3)
    faults = rng.choice((_left_behind, _left_behind, _missed_by_one, _at_random))(rng, at_s, sizes)
    for _ in range(rng.choice((0, 0, 1, 2))):
        at_s = round(at_s + rng.uniform(0.0, 3.0), 3)
        faults.append(rng.choice((sc._nets, sc._stores, sc._kills))(rng, at_s, sizes))
    return sc.replace(sizes, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _long_s(rng: random.Random) -> float:
    return round(rng.choice((5.0, 8.0, 15.0, 40.0)) * rng.uniform(0.8, 1.2), 2)


def _left_behind(rng: random.Random, at_s: float, sizes: Schedule) -> list[AnyFault]:
    """A node is out of reach; the store loses its data once the others have taken that node for dead."""
    isolated = sc.Isolate(at_s=at_s, node=rng.randrange(8), for_s=_long_s(rng), store=True)
    return [isolated, sc.Wipe(at_s=round(at_s + rng.uniform(2.3, 3.3), 3), for_s=rng.choice((0.1, 0.1, 1.0)))]


def _missed_by_one(rng: random.Random, at_s: float, sizes: Schedule) -> list[AnyFault]:
    """One node does not reach the store, another does not reach its fellows."""
    return [
        sc.Cut(at_s=at_s, node=rng.randrange(8), other=-1, for_s=_long_s(rng)),
        sc.Isolate(at_s=round(at_s + rng.uniform(-0.5, 3.0), 3), node=rng.randrange(8), for_s=_long_s(rng)),
    ]


def _at_random(rng: random.Random, at_s: float, sizes: Schedule) -> list[AnyFault]:
    return [_isolation(rng, round(at_s + rng.uniform(0.0, 4.0), 3), sizes) for _ in range(rng.choice((1, 2, 3)))]


def _isolation(rng: random.Random, at_s: float, sizes: Schedule) -> AnyFault:
    """A node from all others, from the store, or from both; or one of its links alone."""
    node, for_s = rng.randrange(8), _long_s(rng)
    kind = rng.randrange(8)
    if kind < 5:
        return sc.Isolate(at_s=at_s, node=node, for_s=for_s, store=kind < 3)
    return sc.Cut(at_s=at_s, node=node, other=-1 if kind < 7 else rng.randrange(8), for_s=for_s)
