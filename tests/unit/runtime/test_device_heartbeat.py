"""What the page says of a device's work: from its submission until it has landed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastrain.base.thread_status import Station, ThreadStatus
from elastrain.comm.shm.heartbeat_page import Lane, Trail, read
from elastrain.comm.shm.liveness import Beacon
from elastrain.device import DeviceDescription, DevicePort, device_of
from elastrain.runtime.io.device_heartbeat import DeviceHeartbeat
from elastrain.runtime.io.heartbeat import LoopHeartbeat


class Far:
    """As much of a port as has to be told."""

    is_host = False
    device = torch.device("xpu:1")

    def describe(self) -> DeviceDescription:
        return DeviceDescription(type="xpu", index=1, name="Far", uuid="far-1")


FAR = cast(DevicePort, Far())
NAME = "xpu:1 (Far, far-1)"


class Watched:
    """A loop, its device, and the page that both write to."""

    def __init__(self, beacon: Beacon, port: DevicePort = FAR) -> None:
        self._page = beacon.page
        self.loop = LoopHeartbeat(Trail(beacon.page, Lane.LOOP))
        self.device: DeviceHeartbeat = self.loop.device
        self.device.watch(port, Trail(beacon.page, Lane.DEVICE))

    @property
    def spot(self) -> ThreadStatus:
        return read(self._page, Lane.DEVICE)

    @property
    def shown(self) -> tuple[Station, int, float]:
        return self.spot.place, self.spot.step, self.spot.allowed_s


@pytest.fixture
def beacon() -> Iterator[Beacon]:
    made = Beacon()
    yield made
    made.close()


def in_thread(act: Any) -> int:
    """Call in another thread, and return the thread's number in the kernel."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert thread.native_id is not None
    return thread.native_id


def test_a_member_computes_until_all_that_it_submitted_has_landed(beacon: Beacon) -> None:
    watched = Watched(beacon)
    device, loop = watched.device, watched.loop
    assert watched.spot.place is Station.WAITING and watched.spot.name == NAME
    loop.enter(Station.COMPUTING, 3)
    device.submitted()
    device.submitted()
    loop.enter(Station.WAITING)
    assert watched.shown == (Station.COMPUTING, 3, 0.0) and watched.spot.name == NAME
    assert device.is_computing and loop.is_computing, "the loop waits, and the device computes"
    before = watched.spot.count
    landing = in_thread(device.landed)
    assert watched.spot.place is Station.COMPUTING and watched.spot.count == before + 1
    assert watched.spot.thread == landing, "it needs a processor to tell of the next one"
    device.landed()
    assert watched.shown == (Station.WAITING, -1, 0.0) and watched.spot.name == NAME
    assert not device.is_computing and not loop.is_computing


def test_on_the_host_nothing_is_written(beacon: Beacon) -> None:
    watched = Watched(beacon, device_of(torch.device("cpu")))
    watched.loop.enter(Station.COMPUTING, 3)
    watched.device.submitted()
    assert not watched.device.is_computing
    watched.device.landed()
    assert watched.spot == ThreadStatus(step=0)
    unwatched = LoopHeartbeat().device
    unwatched.submitted()
    unwatched.landed()


def test_the_page_says_from_where_the_oldest_work_was_submitted(beacon: Beacon) -> None:
    watched = Watched(beacon)
    device, loop = watched.device, watched.loop
    loop.enter(Station.BETWEEN, 4)
    device.submitted()
    loop.enter(Station.COMPUTING, 5)
    device.submitted()
    assert watched.shown == (Station.BETWEEN, 4, 0.0)
    device.landed()
    assert watched.shown == (Station.COMPUTING, 5, 0.0)
    device.landed()
    loop.enter(Station.OUTSIDE)
    device.submitted()
    assert watched.spot.place is Station.OUTSIDE, "outside of the steps the member owes nothing"


def test_work_behind_a_phase_has_the_time_of_the_phase(beacon: Beacon) -> None:
    """An evaluation that only launches kernels has left its phase before they have run."""
    watched = Watched(beacon)
    device, loop = watched.device, watched.loop
    loop.enter(Station.BETWEEN, 4)
    with loop.stretch("evaluation", 70.0), loop.stretch("plots", 20.0):
        pass
    in_thread(device.submitted)  # not work of the loop: the time stays
    device.submitted()
    device.submitted()
    for shown in [(Station.DECLARED, 4, 70.0)] * 2 + [(Station.BETWEEN, 4, 0.0)]:
        assert watched.shown == shown
        device.landed()


def test_within_a_phase_all_work_has_its_time(beacon: Beacon) -> None:
    watched = Watched(beacon)
    device, loop = watched.device, watched.loop
    loop.enter(Station.COMPUTING, 4)
    with loop.stretch("much attention", 70.0):
        device.submitted()
        device.submitted()
    for _ in range(2):
        assert watched.shown == (Station.DECLARED, 4, 70.0)
        device.landed()
    device.submitted()
    device.landed()
    device.submitted()
    assert watched.shown == (Station.COMPUTING, 4, 0.0)


def test_the_wait_for_the_loader_gives_the_device_no_time(beacon: Beacon) -> None:
    watched = Watched(beacon)
    watched.loop.enter(Station.COMPUTING, 4)
    with watched.loop.known_stretch("loading", 300.0):
        pass
    watched.device.submitted()
    assert watched.shown == (Station.COMPUTING, 4, 0.0)


def test_the_oldest_work_has_its_micro_batch_although_more_was_submitted(beacon: Beacon) -> None:
    watched = Watched(beacon)
    for micro_batch in (2, 3, 4):
        watched.loop.enter(Station.COMPUTING, 1, micro_batch)
        watched.device.submitted()
    watched.loop.enter(Station.WAITING)
    watched.device.landed()
    assert watched.device.oldest is not None and watched.device.oldest.micro_batch == 3
    for _ in range(2):
        watched.device.landed()
    assert watched.device.oldest is None


@given(moves=st.lists(st.booleans(), max_size=40))
def test_landings_move_the_lane_and_work_behind_other_work_does_not(moves: list[bool]) -> None:
    beacon = Beacon()
    try:
        watched = Watched(beacon)
        watched.loop.enter(Station.COMPUTING, 1)
        pending = 0
        for is_submission in moves:
            before = watched.spot
            if is_submission:
                watched.device.submitted()
                assert (watched.spot == before) is (pending > 0)
                pending += 1
            elif pending:
                watched.device.landed()
                assert watched.spot.count > before.count
                pending -= 1
            assert (watched.spot.place is Station.COMPUTING) is watched.device.is_computing is (pending > 0)
    finally:
        beacon.close()


def test_threads_may_submit_and_land_at_the_same_time(beacon: Beacon) -> None:
    watched = Watched(beacon)
    watched.loop.enter(Station.COMPUTING, 1)

    def submit_and_land() -> None:
        for _ in range(300):
            watched.device.submitted()
            watched.device.landed()

    threads = [threading.Thread(target=submit_and_land) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watched.spot.place is Station.WAITING and not watched.device.is_computing
