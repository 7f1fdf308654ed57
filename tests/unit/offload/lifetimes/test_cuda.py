"""The order between what computes and what copies on a CUDA device, with streams and events that only note calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from elastrain.offload.drives import transfer
from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.lifetimes.pieces.cuda import CudaLanes, CudaMeter, host_tier


class Noted:
    """What was called, in order; `now` is the current stream."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now = "compute"
        self.capturing = False

    def stream(self, _device: Any = None, *, priority: int = 0) -> Any:
        assert priority < 0, "sums of what was moved would wait for what computes"
        noted = self

        class Stream:
            def __str__(self) -> str:
                return "what copies"

            def wait_event(self, event: Any) -> None:
                noted.calls.append(f"waits for {event.behind}")

        return Stream()

    def event(self, *, blocking: bool = False) -> Any:
        calls = self.calls

        class Event:
            behind = ""

            def record(self, stream: str) -> None:
                self.behind = stream

            def synchronize(self) -> None:
                calls.append(f"{self.behind} is reached")

        return Event()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    made = Noted()

    @contextmanager
    def on(_stream: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made.now)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "Stream", made.stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(transfer, "_MINE", threading.local())  # streams of its threads
    return made


def test_a_copy_comes_after_its_mark_and_has_ended_when_it_is_reported(noted: Noted) -> None:
    lanes = CudaLanes(torch.device("cuda"))
    with lanes.copying(lanes.mark()):
        noted.calls.append("copies")
    assert noted.calls == ["waits for compute", "copies", "what copies is reached"]


def test_a_copy_that_fails_has_ended_too_before_its_buffer_goes_to_another(noted: Noted) -> None:
    lanes = CudaLanes(torch.device("cuda"))
    with pytest.raises(OSError, match="planted"), lanes.copying(lanes.mark()):
        raise OSError("planted")
    assert noted.calls == ["waits for compute", "what copies is reached"]


def test_a_second_stream_and_a_graph_being_captured_are_refused(noted: Noted) -> None:
    lanes = CudaLanes(torch.device("cuda"))
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


def test_who_runs_ahead_of_the_device_is_one_point_ahead(noted: Noted) -> None:
    meter = CudaMeter(torch.device("cuda"))
    for point in ("first", "second", "third"):
        noted.now = point
        meter.keep_pace()
    assert noted.calls == ["first is reached", "second is reached"]
