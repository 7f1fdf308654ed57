"""Bugs planted into what checkpoints on nodes' own disks rest on: jobs that lose everything have to show each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

from elastrain.launcher.core import rendezvous
from elastrain.launcher.shared.checkpoint_inventory import DiskOffer, Joined, Offered
from elastrain.launcher.start import restarts
from elastrain.launcher.start import start_checkpoint as launcher_checkpoints
from elastrain.launcher.start.restarts import LifeEnd
from elastrain.launcher.start.start_checkpoint import Beginning
from elastrain.snapshot.durable.reading import Checkpoint
from tests.sim.job import schedule as sc
from tests.sim.job.disk_schedules import draw_disks
from tests.sim.job.plants import Plant, Rule, planter

PLANTS: dict[str, Plant] = {}


def _several(schedule: sc.Schedule) -> bool:
    return schedule.nodes > 1


def _lost(schedule: sc.Schedule) -> bool:
    return any(isinstance(fault, sc.LoseDisk) for fault in schedule.faults)


def _damaged(schedule: sc.Schedule) -> bool:
    return any(isinstance(fault, sc.DamageDisk) for fault in schedule.faults)


_plant = planter(PLANTS, draw=draw_disks, kind="disks", only=lambda schedule: True)


def _changed(offered: Offered, change: Callable[[DiskOffer], DiskOffer | None]) -> Offered:
    return [(disk, [new for each in offers if (new := change(each)) is not None]) for disk, offers in offered]


@_plant(rendezvous, "join")
def takes_the_oldest_that_is_whole(rule: Rule, offered: Offered, *, is_wary: bool) -> Joined:
    """A life goes on from the newest checkpoint that the disks together have whole."""
    for name in sorted({each.name for _, offers in offered for each in offers}):
        one = _changed(offered, lambda each, name=name: each if each.name == name else None)  # type: ignore[misc]
        found: Joined = rule(one, is_wary=is_wary)
        if found.resume is not None:
            return found
    return rule(offered, is_wary=is_wary)  # type: ignore[no-any-return]


@_plant(rendezvous, "join", _lost)
def counts_copies_on_lost_nodes(rule: Rule, offered: Offered, *, is_wary: bool) -> Joined:
    """A copy that a manifest names counts only where a disk that is here has it."""
    named = lambda each: replace(each, files=(*each.files, *chain(*each.needs)))  # noqa: E731
    return rule(_changed(offered, named), is_wary=is_wary)  # type: ignore[no-any-return]


@_plant(rendezvous, "join", _several)
def wants_every_copy(rule: Rule, offered: Offered, *, is_wary: bool) -> Joined:
    """One good copy of each shard is enough: the others' disks may be gone."""
    each_alone = lambda each: replace(each, needs=tuple((file,) for need in each.needs for file in need))  # noqa: E731
    return rule(_changed(offered, each_alone), is_wary=is_wary)  # type: ignore[no-any-return]


@_plant(Checkpoint, "damaged", _damaged)
def offers_what_is_damaged(rule: Rule, part: Checkpoint, **_: bool) -> dict[str, str]:
    """A later life reads what lies on each disk to its end before that is offered."""
    return {}


@_plant(restarts, "_newest_known", _several)
def counts_only_its_own_disk(rule: Rule, store: Any, old: Any, ended: LifeEnd, own: int | None) -> int | None:
    """A node whose own disk has no checkpoint goes on with those whose disks have one."""
    return own


@_plant(launcher_checkpoints, "_offered", _several)
def begins_anew_where_no_disk_has_anything(rule: Rule, *given: Any) -> Beginning:
    """A later life waits for the nodes that have its checkpoints, and does not begin from nothing."""
    return replace(rule(*given), named="")
