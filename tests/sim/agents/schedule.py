"""What is drawn for one schedule, and the times of all schedules in seconds."""

from __future__ import annotations

import random
from dataclasses import dataclass

from elastrain.job.values import Shape, ShardShape

LEASE_S = 3.0
SILENCE_S = 2.5
DISTRUST_S = 6.0
STEP_S = 0.2
FAULTS_UNTIL_S = 25.0
QUIET_S = 45.0
"""Faults are over and everything is mended: by then each agent has ended or trains."""
GOES_ON_S = 10.0
"""An agent goes on if its job has committed a step within this time."""
SHARDS = 3


class Violation(AssertionError):  # noqa: N818  named as what it is: a broken invariant
    """What must hold does not."""


@dataclass(frozen=True, kw_only=True)
class Play:
    """What is drawn for one schedule."""

    nodes: int
    workers: int
    backups: int
    faults: int
    one_host: bool
    burst: bool
    """Most faults come close upon another one."""
    spares: int = 0
    ends_at: int | None = None
    """The step after which the job's work is done."""
    altered: str = ""
    """The member whose parameters change at the very end."""


def draw(seed: int) -> Play:
    rng = random.Random(f"play {seed}")
    return Play(
        nodes=rng.choice((2, 2, 3, 3, 4)),
        workers=rng.choice((1, 1, 1, 2)),
        backups=rng.choice((0, 1, 1, 2)),
        faults=rng.choice((1, 2, 3, 4, 6, 9)),
        one_host=rng.random() < 0.5,
        burst=rng.random() < 0.5,
    )


def shape_of(play: Play) -> Shape:
    shard = ShardShape(size_bytes=8, lanes=(0,))
    return Shape(runs=1, blocks=1, shards=(shard,) * SHARDS, backups=play.backups)
