"""Draws mixed faults from a seed: which way, in which phase, whom, and how long after the one before. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from elastrain.launcher.faults.table import CLASSES
from experiments.faults.cells import WAYS, Aim, Answer, Ground, Way

PHASES = ("forward", "backward", "reduce", "commit", "apply", "publish")
AT_ONCE = ("etcd-kill", "etcd-stop", "etcd-compact", "etcd-wipe")
"""What strikes the store strikes at any time."""
LEFT_OUT = ("--how lock", "wrong-replacement")
"""A member that holds its interpreter for ever, and replacements that do not fit, take as long as ten other faults."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Due `wait_s` after the one before; `pick` is the victim as a fraction of the members' list."""

    way: Way
    phase: str
    pick: float
    wait_s: float


def ways() -> list[Way]:
    """Those that a job of several nodes must survive, each once."""
    found = [
        way
        for way in WAYS
        if way.answer is Answer.GOES_ON
        and way.ground is not Ground.NETNS
        and way.aim in (Aim.MEMBER, Aim.NODE, Aim.ETCD)
        and not any(word in way.name for word in LEFT_OUT)
    ]
    return list({way.name: way for way in found}.values())


def faults(seed: int, mtbf_s: float) -> Iterator[Drawn]:
    """Without end; a third and more are kills of members: most of what fails outside ends a process."""
    chance = random.Random(f"soak {seed}")
    others = ways()
    kill = next(way for way in others if way.name == "kill")
    while True:
        way = kill if chance.random() < 0.3 else chance.choice(others)
        yield Drawn(
            way=way,
            phase="" if way.kind in AT_ONCE else chance.choice(_phases(way)),
            pick=chance.random(),
            wait_s=chance.expovariate(1 / mtbf_s),
        )


def _phases(way: Way) -> tuple[str, ...]:
    return tuple(phase for phase in PHASES if phase in CLASSES[way.kind].phases)
