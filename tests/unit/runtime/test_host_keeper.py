"""The keeper of host memory: backups leave for a drive when they have no room, and a plan without room is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elastrain.errors import NoRoomError
from elastrain.offload.drives.device import Device
from elastrain.runtime.memory.host_keeper import HostKeeper
from elastrain.runtime.memory.process_memory import Peak
from tests.support.memory_engine import MemoryEngine
from tests.unit.memory.test_two_memories import BOTH, HOST, MIB

BASE = 100 * MIB
BACKUPS = sum(each.leaves_bytes for each in HOST.held)
GRADIENTS = HOST.gradients_bytes


class Meter:
    """A process whose memory a test sets."""

    def __init__(self) -> None:
        self.now_bytes = self.peak_bytes = BASE

    def look(self) -> None: ...

    def take(self) -> Peak:
        return Peak(least_bytes=self.peak_bytes, most_bytes=self.peak_bytes)


class Executor:
    """The part of an executor that the keeper uses. States of shards outside lie on the drive."""

    captures = None

    def __init__(self) -> None:
        self.outside: list[frozenset[int]] = []

    def backups_bytes(self) -> int:
        outside = self.outside[-1] if self.outside else frozenset(each.shard for each in HOST.held)
        return sum(each.leaves_bytes for each in HOST.held if each.shard not in outside)

    def keep_outside(self, drives: object, shards: frozenset[int], *, backups: bool) -> None:
        assert backups
        self.outside.append(shards)


@pytest.fixture
def make() -> Callable[..., tuple[HostKeeper, Executor, Meter, list[dict[str, Any]]]]:
    def made(limit_bytes: int, *, has_drive: bool = True) -> tuple[HostKeeper, Executor, Meter, list[dict[str, Any]]]:
        executor, meter, told = Executor(), Meter(), list[dict[str, Any]]()
        keeper = HostKeeper(
            limit_bytes,
            me="m0",
            executor=executor,  # type: ignore[arg-type]
            meter=meter,  # type: ignore[arg-type]
            drives=[Device(MemoryEngine(capacity_bytes=1 << 30), threads=0)] if has_drive else [],
            log=lambda event, **values: told.append({"event": event, **values}),
        )
        return keeper, executor, meter, told

    return made


def test_backups_stay_where_there_is_room(make: Callable[..., Any]) -> None:
    keeper, executor, _, told = make(BASE + GRADIENTS + BACKUPS)
    keeper.plan(BOTH)
    assert executor.outside == [frozenset()]
    assert told[-1]["reason"].endswith("everything stays in host memory")


def test_backups_leave_for_a_drive_where_there_is_none(make: Callable[..., Any]) -> None:
    keeper, executor, _, told = make(BASE + GRADIENTS + BACKUPS - 1)
    keeper.plan(BOTH)
    [outside] = executor.outside
    assert len(outside) == 1
    assert told[-1]["event"] == "host_room" and "1 shards held as a backup" in told[-1]["reason"]


def test_more_leave_once_a_step_has_taken_more_than_was_expected(make: Callable[..., Any]) -> None:
    keeper, executor, meter, told = make(BASE + GRADIENTS + BACKUPS + MIB)
    keeper.plan(BOTH)
    meter.peak_bytes = BASE + GRADIENTS + BACKUPS
    for _ in range(3):
        keeper.passed(BOTH)
    assert executor.outside == [frozenset()], "what was measured to fit stays"
    meter.peak_bytes += 2 * MIB
    keeper.passed(BOTH)
    assert [len(outside) for outside in executor.outside] == [0, 1]
    assert told[-2] == {"event": "host_memory", "peak_bytes": meter.peak_bytes, "backups_bytes": BACKUPS}


def test_a_plan_without_room_is_refused_and_names_the_memory(make: Callable[..., Any]) -> None:
    keeper, executor, _, told = make(BASE + GRADIENTS + BACKUPS - 1, has_drive=False)
    with pytest.raises(NoRoomError, match="member m0: a member's host memory limit is 1 MiB too small for this plan"):
        keeper.plan(BOTH)
    assert executor.outside == [] and told[-1]["event"] == "no_room"
