"""From a seed to a schedule: every choice of the scenario follows from the seed alone, so a seed replays everything."""

from __future__ import annotations

import random
from functools import cache

from tests.sim.checks import Truth
from tests.sim.cluster import Cluster, Scenario, truth_of


def draw(seed: int) -> Scenario:
    """Faults, what a job starts from, how often members check each other, and how slow background work is."""
    rng = random.Random(seed)
    faults, check_every, slow_behind = _draw_faults(rng), rng.choice([0, 0, 1, 2]), rng.randrange(10) == 0
    resumes = rng.choice([None] * 10 + [-1, 0, 1])
    early = resumes is not None and rng.random() < 0.5  # while members still read what they start from
    drawn = _with(faults, check_every=check_every, slow_behind=slow_behind, resumes=resumes, early=early)
    if rng.randrange(4):
        return drawn
    return _with(
        drawn,
        checkpoint_every=rng.choice([0, 1, 1, 2]),
        local_disks=rng.choice([False, False, True]),
        wishes=rng.choice([0, 1, 2]),
        full_disks=rng.choice([0, 0, 0, 1]),
    )


def _draw_faults(rng: random.Random) -> Scenario:
    """Mixed faults mostly; some hunt holders or first committers, compute wrongly, drift apart, or go on for long."""
    size = Scenario(
        members=rng.choice([1, 2, 3, 4, 5]),
        nodes=rng.choice([0, 0, 2]),
        steps=rng.choice([3, 4]),
        runs=rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9]),
        stalls=rng.choice([0, 1, 2]),
        unread=rng.choice([0, 0, 1, 2]),
        backups=rng.choice([0, 1, 1, 1, 2, 2, 2]),
        budget_bytes=rng.choice([1, 20, 1 << 20]),
    )
    slow = rng.choice([0.0, 0.0, 0.2, 0.4])
    joins = rng.choice([0, 1, 2])
    kind = rng.randrange(20)
    if kind == 0 and rng.randrange(3) == 0:
        size = _with(size, members=max(3, size.members), backups=max(1, size.backups), joins=joins, slow=slow)
        return _with(size, heirs=rng.choice([1, 1, 2]), crashes=rng.choice([0, 0, 1]))
    if kind == 0:
        return _with(
            size,
            members=max(2, size.members),
            backups=max(1, size.backups),
            joins=joins,
            slow=slow,
            flips=rng.choice([1, 1, 2, 3]),
        )
    if kind <= 2:
        return _with(size, members=max(3, size.members), backups=max(1, size.backups), joins=joins, slow=slow, hunts=3)
    if kind <= 4:
        return _with(size, members=max(3, size.members), backups=1, crashes=1, zombies=1, slow=0.4, trapped=True)
    if kind == 5:
        return _with(size, members=max(2, size.members), joins=joins, drifts=1)
    if kind == 6:
        steps = rng.choice([8, 10])
        size = _with(size, members=max(3, size.members), backups=max(1, size.backups), steps=steps)
        return _with(size, crashes=1, joins=joins)
    if kind == 7:
        return _with(size, members=max(3, size.members), runs=max(4, size.runs), backups=2, pairs=2, joins=joins)
    return _with(
        size,
        crashes=rng.choice([0, 1, 1, 2]),
        zombies=rng.choice([0, 0, 1]),
        joins=joins,
        isolated=rng.choice([False, False, True]),
        slow=slow,
    )


def _with(size: Scenario, **changes: object) -> Scenario:
    return Scenario(**{**size.__dict__, **changes})


@cache
def _truth(steps: int, runs: int, backups: int) -> Truth:
    return truth_of(Scenario(steps=steps, runs=runs, backups=backups))


def cluster_of(seed: int, make: type[Cluster] = Cluster) -> Cluster:
    """The job of this seed, ready to run."""
    scenario = draw(seed)
    return make(scenario, seed, _truth(scenario.steps, scenario.runs, scenario.backups))
