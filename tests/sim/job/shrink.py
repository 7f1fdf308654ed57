"""From a schedule that breaks something to a small one that still does: delta debugging over its faults and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from tests.sim.job.schedule import Schedule
from tests.sim.job.world import World

Fails = Callable[[Schedule], bool]


def failure_of(schedule: Schedule) -> str:
    """What goes wrong in it, as one line; empty if nothing does."""
    world = World(schedule)
    try:
        world.run()
    except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
        return f"{type(error).__name__}: {error}"
    return ""


def shrink(schedule: Schedule, fails: Fails, tries: int = 400) -> Schedule:
    """The smallest that was found within so many tries; `fails` says whether one still shows the defect."""
    left = tries
    while left > 0:
        for smaller in _smaller(schedule):
            left -= 1
            if fails(smaller):
                schedule = smaller
                break
            if left <= 0:
                break
        else:
            return schedule
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Less of everything, the most first: faults, then sizes, then what a fault is, then times."""
    yield from _fewer_faults(schedule)
    # A job that goes on from a checkpoint has a step to do; with none it would end wrongly, which is another failure.
    steps = 1 if schedule.resumes is None else schedule.resumes + 2
    for field, least in (("nodes", 1), ("workers", 1), ("steps", steps), ("runs", 1), ("backups", 0)):
        value = getattr(schedule, field)
        for less in sorted({least, value - 1} - {value}):
            if less >= least:
                yield replace(schedule, **{field: less})
    for field, plain in (
        ("check_every", 0),
        ("slow_store", -1),
        ("used_store", False),
        ("slow_behind", False),
        ("one_host", True),
        ("checkpoint_every", 0),
    ):
        if getattr(schedule, field) != plain:
            yield replace(schedule, **{field: plain})
    yield from _plainer_faults(schedule)


def _fewer_faults(schedule: Schedule) -> Iterator[Schedule]:
    faults = schedule.faults
    size = len(faults) // 2
    while size:
        for first in range(0, len(faults), size):
            yield replace(schedule, faults=faults[:first] + faults[first + size :])
        size //= 2


def _plainer_faults(schedule: Schedule) -> Iterator[Schedule]:
    for index, fault in enumerate(schedule.faults):
        for field in fault.__struct_fields__:
            value = getattr(fault, field)
            for plain in _plainer(field, value):
                plainer = replace(fault, **{field: plain})
                faults = (*schedule.faults[:index], plainer, *schedule.faults[index + 1 :])
                yield replace(schedule, faults=tuple(sorted(faults, key=lambda each: each.at_s)))


def _plainer(field: str, value: object) -> list[object]:
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, float):
        return [float(round(value))] if value != round(value) else []
    if isinstance(value, int) and value > 0:
        return [value // 2] if value > 1 else [0]
    return []
