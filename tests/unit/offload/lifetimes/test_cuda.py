"""The order between what computes and what copies on a device, with streams and events that only note calls."""

from __future__ import annotations

import pytest

from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.lifetimes.pieces.cuda import CudaLanes, CudaMeter, host_tier
from tests.support.noted_device import NotedModule


def test_a_copy_comes_after_its_mark_and_has_ended_when_it_is_reported() -> None:
    noted = NotedModule()
    lanes = CudaLanes(noted.port())
    with lanes.copying(lanes.mark()):
        noted.calls.append("copies")
    assert noted.calls == ["side waits for compute", "copies", "side is reached"]


def test_a_copy_that_fails_has_ended_too_before_its_buffer_goes_to_another() -> None:
    noted = NotedModule()
    lanes = CudaLanes(noted.port())
    with pytest.raises(OSError, match="planted"), lanes.copying(lanes.mark()):
        raise OSError("planted")
    assert noted.calls == ["side waits for compute", "side is reached"]


def test_a_second_stream_and_a_graph_being_captured_are_refused() -> None:
    noted = NotedModule()
    lanes = CudaLanes(noted.port())
    lanes.mark()
    noted.now = "another"
    with pytest.raises(OffloadConfigError, match="uses a second CUDA stream"):
        lanes.mark()
    noted.capturing = True
    with pytest.raises(OffloadConfigError, match="a CUDA graph is being captured"):
        lanes.mark()


def test_a_host_tier_takes_no_more_than_it_has() -> None:
    tier = host_tier(1 << 20)
    copy = tier.write(memoryview(bytearray(512 << 10)), 0, lambda: False)
    assert tier.has_room(256 << 10)
    assert not tier.has_room(512 << 10)  # a part is left for holes
    tier.free(copy.slot)
    assert tier.has_room(512 << 10)
    tier.close()


def test_more_host_memory_than_the_machine_has_is_refused() -> None:
    with pytest.raises(OffloadConfigError, match=r"1e\+03 TiB of host memory were asked for .* ask for less"):
        host_tier(1000 << 40)


def test_who_runs_ahead_of_the_device_is_one_point_ahead() -> None:
    noted = NotedModule()
    meter = CudaMeter(noted.port())
    for point in ("first", "second", "third"):
        noted.now = point
        meter.keep_pace()
    assert noted.calls == ["first is reached", "second is reached"]
