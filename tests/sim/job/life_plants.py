"""Bugs planted into what a job's lives rest on: each breaks one rule, and jobs that lose everything have to show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from elastrain.buffers.captures import Captures
from elastrain.launcher.core.shutdown import Shutdown
from elastrain.launcher.shared.job_values import Command, Life
from elastrain.launcher.start import restarts
from elastrain.launcher.start.restarts import Following, LifeEnd
from elastrain.launcher.store.life_keys import read_life
from elastrain.member.checkpointing import Checkpointing
from elastrain.snapshot.durable import retention
from elastrain.snapshot.durable.publishing import visible
from elastrain.snapshot.durable.retention import remove
from tests.sim.job import lives as sim_lives
from tests.sim.job import schedule as sc
from tests.sim.job.plants import Plant, Rule, planter

PLANTS: dict[str, Plant] = {}


def _several(schedule: sc.Schedule) -> bool:
    return schedule.nodes > 1


def _damaged(schedule: sc.Schedule) -> bool:
    return any(isinstance(fault, sc.Damage) for fault in schedule.faults)


def _crammed(schedule: sc.Schedule) -> bool:
    return schedule.no_room


_plant = planter(PLANTS, draw=sc.draw_lives, kind="lives", only=lambda schedule: True)


@_plant(retention, "candidates")
def chooses_the_oldest(rule: Rule, places: Sequence[Any]) -> list[str]:
    """A life goes on from the newest good checkpoint."""
    return list(reversed(rule(places)))


@_plant(retention, "thorough", _damaged)
def looks_only_at_sizes(rule: Rule, checkpoint: Any) -> list[str]:
    """A later life reads checkpoints to their end before it takes one: else all of them start from a damaged one."""
    return retention.quick(checkpoint)


@_plant(retention, "tidy", _damaged)
def removes_before_a_newer_one_is_verified(rule: Rule, place: Any, *, keep: int) -> list[str]:
    """An older checkpoint goes when a newer one has been read back whole."""
    for name in visible(place)[:-1]:
        remove(place, name)
    return []


@_plant(Checkpointing, "on_began")
def keeps_the_samples_of_a_committed_step(rule: Rule, part: Checkpointing, step: int, state: str) -> None:
    """The loop goes on after the samples of the checkpoint's step: none counts twice after a resume."""
    rule(part, step, str(int(state) - 1))


@_plant(Captures, "work", _crammed)
def writes_only_what_is_about_to_change(rule: Rule, part: Captures) -> None:
    """A state that no copy has room for is written, too, where no step follows: the job's end waits for it."""


@_plant(Shutdown, "on_over", _several)
def hears_the_end_without_the_loss(rule: Rule, part: Shutdown, node: str, notice: Any, now: float) -> list[Command]:
    """Every node hears that the state is lost, and goes on in the next life: one that does not is never seen again."""
    return rule(part, node, msgspec.structs.replace(notice, lost=False), now)  # type: ignore[no-any-return]


@_plant(sim_lives, "agree", _several)
def asks_only_once_for_the_life_that_stands(
    rule: Rule, store: Any, job: str, ttl_s: float, ended: LifeEnd, newest_step: int | None
) -> Following:
    """Whoever comes second finds the life that another has begun."""
    if read_life(store, job)[1].number > ended.life.number:
        return Following(life=None, reason="it has begun without this node")
    return rule(store, job, ttl_s, ended, newest_step)  # type: ignore[no-any-return]


@_plant(restarts, "_counted")
def numbers_begin_anew(rule: Rule, store: Any, counter: str) -> tuple[int, int]:
    """No member's number is used in two lives."""
    return 0, rule(store, counter)[1]


@_plant(restarts, "next_life")
def no_life_follows(rule: Rule, life: Life, end: Any, **given: Any) -> Following:
    """A job that has lost its state, and has a checkpoint, goes on."""
    return Following(life=None, reason="nobody wants to")
