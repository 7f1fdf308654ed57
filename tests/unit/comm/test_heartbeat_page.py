"""What a process writes of its threads and its device, and what another one reads of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from elastrain.base.thread_status import Station, ThreadStatus
from elastrain.comm.shm.heartbeat_page import Lane, Trail, read
from elastrain.comm.shm.liveness import Beacon, Watcher, watch_beacon


@pytest.fixture
def beacon() -> Iterator[Beacon]:
    made = Beacon()
    yield made
    made.close()


@pytest.fixture
def watcher(beacon: Beacon) -> Iterator[Watcher]:
    fd = os.dup(beacon.fd)
    made = watch_beacon(fd, lambda _: None)
    os.close(fd)
    yield made
    made.cancel()


def test_what_nobody_has_written_is_outside(watcher: Watcher) -> None:
    assert [read(watcher.page, lane) for lane in Lane] == [ThreadStatus(step=0)] * 3


def test_each_lane_has_a_record_of_its_own(beacon: Beacon, watcher: Watcher) -> None:
    beacon.tell_generation(7)
    trails = {lane: Trail(beacon.page, lane) for lane in Lane}
    for lane, trail in trails.items():
        trail.move(Station.DECLARED, step=lane + 1, allowed_s=lane + 0.5, name=f"{lane.name}" * 30)
    trails[Lane.DEVICE].beat()
    me = threading.get_native_id()
    for lane in Lane:
        assert read(watcher.page, lane) == ThreadStatus(
            count=1 + (lane is Lane.DEVICE),
            place=Station.DECLARED,
            thread=me,
            step=lane + 1,
            allowed_s=lane + 0.5,
            name=(f"{lane.name}" * 30)[:96],
        )
    assert watcher.generation == 7 and not watcher.owner_ended


def test_the_thread_is_the_one_that_moved_first_unless_another_one_is_named(beacon: Beacon) -> None:
    trail = Trail(beacon.page, Lane.DEVICE)
    trail.move(Station.COMPUTING)
    assert read(beacon.page, Lane.DEVICE).thread == threading.get_native_id()
    trail.thread = 12
    trail.move(Station.WAITING)
    assert read(beacon.page, Lane.DEVICE).thread == 12
