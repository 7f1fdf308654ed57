"""Schedules of jobs that write checkpoints on nodes' own disks, and lose everything."""

from __future__ import annotations

import random

from tests.sim.job import schedule as sc
from tests.sim.job.schedule import AnyFault, Schedule


def draw_disks(seed: int) -> Schedule:
    """The schedule of this seed: with each loss of all holders, disks may be damaged, lost or full."""
    rng = random.Random(f"disks {seed}")
    sizes = Schedule(
        seed=seed,
        nodes=rng.choice((1, 2, 2, 3, 3, 4)),
        workers=rng.choice((1, 1, 2)),
        backups=rng.choice((0, 1, 1, 2)),
        steps=rng.choice((5, 6, 7)),
        runs=rng.choice((1, 2, 3)),
        one_host=rng.random() < 0.5,
        checkpoint_every=rng.choice((1, 1, 2)),
        local_disks=True,
        no_room=rng.random() < 0.25,
    )
    faults, at_s = list[AnyFault](), 2.0
    for _ in range(rng.choice((1, 1, 2, 3))):
        at_s += rng.uniform(0.8, 2.5)
        faults += _losses(rng, round(at_s, 3), sizes)
    if sizes.nodes > 1 and rng.random() < 0.2:
        faults += sc._notices(rng, sizes)
    return sc.replace(sizes, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _losses(rng: random.Random, at_s: float, sizes: Schedule) -> list[AnyFault]:
    shard, later_s = rng.randrange(4), round(at_s + rng.uniform(0.1, 4.0), 3)
    faults: list[AnyFault] = [sc.KillHolders(at_s=at_s, shard=shard)]
    if rng.random() < 0.5:
        faults = [sc.KillHolders(at_s=at_s, shard=shard, spared=1), sc.KillHolders(at_s=later_s, shard=shard)]
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        hit_s = round(max(0.0, at_s + rng.uniform(-0.8, 0.8)), 3)
        faults.append(sc.DamageDisk(at_s=hit_s, node=rng.randrange(8), which=rng.randrange(12)))
    if sizes.nodes > 1 and rng.random() < 0.35:
        again_s = rng.choice((None, 0.5, 2.0, 6.0))
        hit_s = round(max(0.0, at_s + rng.uniform(-0.8, 1.5)), 3)
        faults.append(sc.LoseDisk(at_s=hit_s, node=rng.randrange(8), again_s=again_s))
    if sizes.nodes > 1 and rng.random() < 0.35:
        again_s = rng.choice((None, 0.5, 2.0, 6.0))
        faults.append(sc.KillNode(at_s=at_s, node=rng.randrange(8), again_s=again_s))
    if rng.random() < 0.15:
        faults.append(sc.DiskFull(at_s=round(max(0.0, at_s - 1.5), 3), for_s=rng.choice((0.5, 2.0))))
    if sizes.nodes > 1 and rng.random() < 0.15:
        faults.append(sc.Join(at_s=round(max(0.0, at_s - rng.uniform(0.0, 2.0)), 3)))
    if rng.random() < 0.3:
        more = rng.choice((sc._kills, sc._stores, sc._nets))
        faults.append(more(rng, round(later_s + rng.uniform(-0.3, 1.5), 3), sizes))
    return faults
