"""The time of a micro-batch is the device's, and the loop does not wait for it."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from elastrain.device import DevicePort
from elastrain.runtime.io.heartbeat import LoopHeartbeat
from elastrain.runtime.io.micro_batch_timer import MicroBatchTimer
from tests.contract.device.conftest import NAMED
from tests.contract.device.test_port import DEADLINE_S


def told(whereabouts: LoopHeartbeat) -> float:
    until_s = time.monotonic() + DEADLINE_S
    while (took_s := whereabouts.take_computed_s()) is None:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    return took_s


def computed(port: DevicePort, timer: MicroBatchTimer, values: torch.Tensor) -> None:
    timer.begin()
    for _ in range(20):
        values = values @ values
    timer.end()


def test_the_time_of_a_micro_batch_comes_once_it_has_landed(port: DevicePort) -> None:
    whereabouts = LoopHeartbeat()
    timer = MicroBatchTimer(port, whereabouts)
    values = port.empty((200, 200), torch.float32).zero_()
    computed(port, timer, values)
    took_s = told(whereabouts)
    assert 0 < took_s < DEADLINE_S
    assert whereabouts.take_computed_s() is None, "it is told once"
    timer.begin()  # a micro-batch that is computed again has no end
    computed(port, timer, values)
    assert 0 < told(whereabouts) < DEADLINE_S
    if port.is_host:
        timer.begin()
        time.sleep(0.05)
        timer.end()
        assert 0.05 <= told(whereabouts) < DEADLINE_S


def test_the_time_is_the_devices_and_costs_the_loop_no_wait(port: DevicePort) -> None:
    if not hasattr(NAMED, "stats"):  # only the strict device counts waits, and has a clock that no host clock shows
        return
    device: Any = NAMED
    device.configure(slowness=1000.0)
    try:
        whereabouts = LoopHeartbeat()
        timer = MicroBatchTimer(port, whereabouts)
        values = port.empty((200, 200), torch.float32).zero_()
        me = threading.current_thread().name
        before = device.stats(me)["waits"]
        began_s = time.monotonic()
        computed(port, timer, values)
        assert device.stats(me)["waits"] == before
        assert port.is_host or told(whereabouts) > 10 * (time.monotonic() - began_s)
    finally:
        device.configure(slowness=1.0)


def test_a_stream_that_never_ends_has_no_time_and_does_not_hold_up_the_loop(port: DevicePort) -> None:
    if not hasattr(NAMED, "hang_at") or port.is_host:
        return
    device: Any = NAMED
    whereabouts = LoopHeartbeat()
    timer = MicroBatchTimer(port, whereabouts)
    values = port.empty((200, 200), torch.float32).zero_()
    device.hang_at(1)
    computed(port, timer, values)
    time.sleep(0.1)
    assert whereabouts.take_computed_s() is None
    device.release()
    assert told(whereabouts) > 0
