"""Memory that runs out, an error that stays, a stream that never ends, and addresses that nobody may touch."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support import late


def device() -> Any:
    return torch.get_device_module("late")


def test_memory_that_runs_out_is_named_and_can_be_had_again() -> None:
    before = device().memory_allocated()
    late.configure(capacity_bytes=before + 4096)
    kept = torch.ones(512, device="late")
    with pytest.raises(torch.OutOfMemoryError, match=rf"allocate 4096 bytes.*capacity of {before + 4096} bytes"):
        torch.ones(1024, device="late")
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([kept, kept])
    assert device().mem_get_info() == (2048, before + 4096)
    del kept
    assert torch.ones(1024, device="late").device.type == "late"


def test_memory_is_counted_to_the_byte_at_each_moment() -> None:
    begin = device().memory_allocated()
    device().reset_peak_memory_stats()
    values = torch.ones(256, device="late")
    view = values[10:].view(2, -1)
    for _ in range(5):
        values + 1
    assert device().memory_allocated() - begin == 1024
    assert device().max_memory_allocated() - begin == 2 * 1024, "each sum is freed before the next one is made"
    del values
    assert device().memory_allocated() - begin == 1024, "a view keeps its memory"
    del view
    assert device().memory_allocated() == begin == torch.accelerator.memory_allocated()


def test_more_than_any_host_has_is_refused_by_the_device() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1125899906842624 bytes"):
        torch.empty(1 << 50, dtype=torch.uint8, device="late")


def test_an_assertion_of_a_kernel_that_fails_breaks_the_device_and_is_raised_later() -> None:
    torch._assert_async(torch.ones(1, device="late"))
    torch._assert_async(torch.zeros(1, device="late"))
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError, match="device-side assert triggered on"):
            device().synchronize()


def test_a_kernel_that_sleeps_for_ever_holds_up_its_stream() -> None:
    device()._sleep(1000)
    device().synchronize()
    side = device().Stream()
    with device().stream(side):
        device()._sleep(1 << 62)
        torch.ones(1, device="late")
    assert not any(side.query() for _ in range(5))
    device().current_stream().synchronize()
    late.release()
    side.synchronize()


def test_an_error_stays_with_the_process() -> None:
    late.configure(uuid="late-7", name="Late Seven")
    values, event = torch.ones(4, device="late"), device().Event()
    late.fail_at(3)
    values += 1
    values += 1
    with pytest.raises(torch.AcceleratorError, match=r"Late Seven \(late-7\)"):
        values += 1
    uses = [
        lambda: values + 1,
        values.cpu,
        lambda: values.copy_(torch.ones(4), non_blocking=True),
        lambda: torch.empty(3, device="late"),
        event.query,
        event.synchronize,
        device().synchronize,
    ]
    for use in uses:
        with pytest.raises(torch.AcceleratorError, match="Late Seven"):
            use()
    assert torch.ones(2).sum() == 2, "the CPU goes on"


def test_an_error_in_a_backward_reaches_the_thread_that_called_it() -> None:
    loss = torch.ones(4, device="late", requires_grad=True).exp().sum()
    late.fail_at(2)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        loss.backward()


@pytest.mark.parametrize("call", ["backward", "grad", "nested"])
def test_an_error_of_a_hook_reaches_the_thread_that_called_backward(call: str) -> None:
    def hook(grad: Tensor) -> None:
        raise ZeroDivisionError("of the hook")

    def doubled(values: Tensor) -> Tensor:
        made = values * 2
        if made.requires_grad:
            made.register_hook(hook)
        return made.exp()

    values = torch.ones(4, device="late", requires_grad=True)
    calls: dict[str, Callable[[], object]] = {
        "backward": lambda: doubled(values).sum().backward(),
        "grad": lambda: torch.autograd.grad(doubled(values).sum(), values),
        "nested": lambda: checkpoint(doubled, values, use_reentrant=True).sum().backward(),
    }
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="of the hook") as raised:
            calls[call]()
        assert raised.traceback[-1].name == "hook"
    values.exp().sum().backward()
    assert values.grad is not None


def test_a_stream_that_never_ends_lets_the_host_submit_but_not_wait() -> None:
    values, host, event = torch.ones(4, device="late"), torch.zeros(4), device().Event()
    late.hang_at(1)
    values += 1
    host.copy_(values, non_blocking=True)
    event.record()
    assert not any(event.query() for _ in range(10)) and host.isnan().all()
    seen: list[Any] = []
    waits = [event.synchronize, values.cpu, values.sum().item, device().synchronize, lambda: torch.ones(2).to("late")]
    threads = [threading.Thread(target=lambda wait=wait: seen.append(wait())) for wait in waits]
    for thread in threads:
        thread.start()
    threads[0].join(0.3)
    assert all(thread.is_alive() for thread in threads)
    late.release()
    for thread in threads:
        thread.join(30)
    assert host.tolist() == [2] * 4 and event.query() and len(seen) == len(waits)


def test_streams_that_wait_for_one_that_never_ends_never_end_either() -> None:
    values, side = torch.ones(4, device="late"), device().Stream()
    device().synchronize()
    late.hang_at(1)
    values += 1
    assert side.record_event().query(), "a stream that waits for nothing goes on"
    side.wait_stream(device().current_stream())
    event = side.record_event()
    assert not any(event.query() for _ in range(10))
    late.release()
    event.synchronize()


def test_nobody_touches_addresses_of_the_device() -> None:
    values = torch.ones(4, device="late")
    if (child := os.fork()) == 0:
        ctypes.string_at(values.data_ptr(), 4)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_an_identity_can_be_set() -> None:
    late.configure(name="Late B", uuid="late-b", capability=(9, 1), multiprocessors=7, capacity_bytes=1 << 20)
    told = device().get_device_properties(0)
    assert (told.name, told.uuid, told.multi_processor_count, told.total_memory) == ("Late B", "late-b", 7, 1 << 20)
    assert (device().get_device_capability(), device().get_device_name()) == ((9, 1), "Late B")
    with pytest.raises(ValueError, match="no setting colour"):
        late.configure(colour="blue")
