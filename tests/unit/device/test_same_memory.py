"""The host as a device: nothing is copied, waited for or allocated."""

from __future__ import annotations

import threading

import pytest
import torch

from elastrain.device import device_of

HOST = device_of(torch.device("cpu"))


def test_a_copy_to_the_same_memory_touches_nothing() -> None:
    tensor = torch.arange(6.0)
    before = tensor._version
    copied = HOST.copy_out(tensor, tensor)
    HOST.copy_in(tensor, tensor.view(2, 3)[:]).wait()
    assert tensor._version == before
    assert copied.query()


def test_events_cost_no_memory_unless_they_have_a_time() -> None:
    tensor = torch.zeros(3)
    assert HOST.record() is HOST.record(blocking=False) is HOST.copy_out(tensor, tensor) is HOST.copy_in(tensor, tensor)
    assert HOST.record(timing=True) is not HOST.record(timing=True)


def test_a_function_is_called_before_then_returns_and_its_error_is_the_callers() -> None:
    found: list[tuple[Exception | None, threading.Thread]] = []
    HOST.record().then(lambda error: found.append((error, threading.current_thread())))
    assert found == [(None, threading.current_thread())]

    def fail(error: Exception | None) -> None:
        raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        HOST.record().then(fail)


def test_an_event_without_a_time_says_so() -> None:
    with pytest.raises(ValueError, match="recorded without timing=True"):
        HOST.record(timing=True).elapsed_s(HOST.record())


def test_pinning_and_figures_are_the_machines() -> None:
    release = HOST.pin(torch.zeros(4))
    assert release is not None
    release()
    held_bytes, peak_bytes = HOST.memory_allocated()
    free_bytes, capacity_bytes = HOST.mem_get_info()
    assert 1 << 20 < held_bytes <= peak_bytes < capacity_bytes
    assert held_bytes % 1024 == free_bytes % 1024 == 0
