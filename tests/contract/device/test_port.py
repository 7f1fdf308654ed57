"""One suite for every device; `conftest.py` says which there are."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastrain.device import DeviceEvent, DevicePort, PinError, device_of, is_accelerator
from tests.contract.device.conftest import NAMED

NUMEL = 1 << 16
DEADLINE_S = 30.0


def numbers(first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + NUMEL, dtype=torch.float32)


def pinned(port: DevicePort, values: torch.Tensor) -> torch.Tensor:
    return port.empty_pinned(values.shape, values.dtype).copy_(values)


def there(port: DevicePort, values: torch.Tensor) -> torch.Tensor:
    """A tensor with these values on the device, which the current stream may read."""
    target = port.empty(values.shape, values.dtype)
    port.copy_in(pinned(port, values), target).wait()
    port.synchronize()  # until then the pinned source is kept
    return target


def back(port: DevicePort, tensor: torch.Tensor) -> torch.Tensor:
    host = port.empty_pinned(tensor.shape, tensor.dtype)
    port.copy_out(tensor, host).synchronize()
    return host


def in_thread(act: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join(DEADLINE_S)
    (result,) = found
    return result


class Calls:
    """Arguments that `then` was called with, in order, and the threads that called."""

    def __init__(self) -> None:
        self.errors: list[Exception | None] = []
        self.threads: list[threading.Thread] = []
        self.order: list[str] = []
        self._told = threading.Condition()

    def note(self, name: str) -> Callable[[Exception | None], None]:
        def call(error: Exception | None) -> None:
            with self._told:
                self.errors.append(error)
                self.threads.append(threading.current_thread())
                self.order.append(name)
                self._told.notify_all()

        return call

    def wait(self, count: int) -> None:
        with self._told:
            assert self._told.wait_for(lambda: len(self.order) >= count, DEADLINE_S), self.order


# Which devices there are.


def test_a_device_has_one_port_and_without_an_index_the_current_one(port: DevicePort) -> None:
    assert device_of(port.device) is port
    assert device_of(torch.device(port.device.type)) is port
    assert is_accelerator(port.device) is not port.is_host


def test_a_device_without_memory_is_refused_by_name() -> None:
    assert not is_accelerator(torch.device("meta"))
    with pytest.raises(ValueError, match="got one on meta"):
        device_of(torch.device("meta"))


# Memory.


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.int64])
def test_memory_is_allocated_there_and_beside_it_on_the_host(port: DevicePort, dtype: torch.dtype) -> None:
    for size, shape in ((12, (12,)), ((3, 4), (3, 4)), (0, (0,))):
        far, near = port.empty(size, dtype), port.empty_pinned(size, dtype)
        assert (far.device, far.dtype, far.shape) == (port.device, dtype, shape)
        assert (near.device.type, near.dtype, near.shape) == ("cpu", dtype, shape)
        assert port.is_host or near.untyped_storage().data_ptr() % mmap.PAGESIZE == near.storage_offset() == 0


def test_figures_of_memory_follow_what_is_allocated(port: DevicePort) -> None:
    free_bytes, capacity_bytes = port.mem_get_info()
    assert 0 < free_bytes <= capacity_bytes
    port.reset_peak_memory_stats()
    before_bytes, _ = port.memory_allocated()
    tensor = there(port, torch.ones(256 << 20, dtype=torch.uint8))
    held_bytes, peak_bytes = port.memory_allocated()
    assert peak_bytes >= held_bytes > before_bytes
    if not port.is_host:
        assert held_bytes - before_bytes >= tensor.nbytes
        del tensor
        port.synchronize()
        assert port.memory_allocated()[0] < held_bytes <= port.memory_allocated()[1]
        port.reset_peak_memory_stats()
        assert port.memory_allocated()[1] < held_bytes


def test_memory_is_pinned_where_it_lies_and_released(port: DevicePort) -> None:
    pages = mmap.mmap(-1, NUMEL * 4)
    memory = torch.frombuffer(pages, dtype=torch.float32)
    release = port.pin(memory)
    memory.copy_(numbers())
    target = port.empty(memory.shape, memory.dtype)
    port.copy_in(memory, target).wait()
    target += 1
    port.copy_out(target, memory).synchronize()
    assert torch.equal(memory, numbers(1))
    if release is not None:
        release()
        release = port.pin(memory)
        assert release is not None
        if port.device.type == "cuda":
            with pytest.raises(PinError, match="bytes of host memory"):
                port.pin(memory)
            assert torch.equal(back(port, there(port, numbers()) * 2), numbers() * 2)  # the refusal is over
        release()


# Copies.


def test_what_is_copied_in_and_out_has_the_same_bits(port: DevicePort) -> None:
    assert torch.equal(back(port, there(port, numbers())), numbers())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32, torch.bool])
def test_other_kinds_of_numbers_travel_too(port: DevicePort, dtype: torch.dtype) -> None:
    values = (numbers() % 7).to(dtype)
    assert torch.equal(back(port, there(port, values)), values)


def test_a_copy_out_begins_after_what_its_thread_has_submitted(port: DevicePort) -> None:
    tensor = there(port, numbers())
    for _ in range(20):
        tensor = tensor + 1
    assert torch.equal(back(port, tensor), numbers(20))


def test_a_copy_in_begins_after_what_still_reads_its_target(port: DevicePort) -> None:
    tensor, source = there(port, numbers()), pinned(port, numbers(1000))
    before = tensor * 2
    port.copy_in(source, tensor).wait()
    after = tensor * 2
    assert torch.equal(back(port, before), 2 * numbers())
    assert torch.equal(back(port, after), 2 * numbers(1000))


def test_a_copy_waits_for_the_event_that_it_is_given_and_for_no_later_work(port: DevicePort) -> None:
    tensor, hosts = there(port, numbers()), []
    done = port.record()
    other = there(port, numbers(5)) * 3  # later work on other memory
    for copy in range(2):
        hosts.append(port.empty_pinned(tensor.shape, tensor.dtype))
        in_thread(lambda: port.copy_out(tensor, hosts[-1], done).synchronize())
        assert torch.equal(hosts[copy], numbers())
    assert torch.equal(back(port, other), 3 * numbers(5))


def test_a_copy_follows_what_a_side_stream_has_made(port: DevicePort) -> None:
    tensor = there(port, numbers())
    ready, host = port.record(), port.empty_pinned(tensor.shape, tensor.dtype)
    with port.side_stream("another"):
        ready.wait()
        made = tensor + 1
        done = port.record()
    port.copy_out(made, host, done).synchronize()
    assert torch.equal(host, numbers(1))


def test_device_memory_that_is_dropped_is_not_reused_under_a_copy(port: DevicePort) -> None:
    host = port.empty_pinned(NUMEL, torch.float32)
    tensor = there(port, numbers()) + 1
    copied = port.copy_out(tensor, host)
    del tensor
    for _ in range(4):
        torch.full((NUMEL,), -1.0, device=port.device)
    copied.synchronize()
    assert torch.equal(host, numbers(1))


def test_device_memory_that_is_dropped_is_not_written_by_a_copy_that_comes_later(port: DevicePort) -> None:
    source, target = pinned(port, numbers()), port.empty(NUMEL, torch.float32)
    copied = port.copy_in(source, target)
    del target
    others = [torch.full((NUMEL,), -1.0, device=port.device) for _ in range(4)]
    copied.wait()
    assert all(torch.equal(back(port, other), torch.full((NUMEL,), -1.0)) for other in others)


def test_a_thread_that_copies_waits_for_nothing(port: DevicePort) -> None:
    """Counted by a device that counts waits."""
    waits: Callable[[], dict[str, int]] = getattr(NAMED, "stats", dict)
    tensor = there(port, numbers())
    source, host = pinned(port, numbers()), port.empty_pinned(NUMEL, torch.float32)
    before = waits().get("waits")
    port.copy_in(source, tensor).wait()
    tensor += 1
    copied = port.copy_out(tensor, host)
    with port.side_stream():
        copied.wait()
    assert waits().get("waits") == before
    copied.synchronize()
    assert torch.equal(host, numbers(1))


def test_tensors_that_are_not_contiguous_are_copied(port: DevicePort) -> None:
    tensor = there(port, numbers().view(256, -1).t().contiguous())
    host = port.empty_pinned((256, NUMEL // 256), torch.float32)
    port.copy_out(tensor.t(), host).synchronize()
    assert torch.equal(host, numbers().view(256, -1))


def test_memory_that_is_not_pinned_is_copied_too(port: DevicePort) -> None:
    target, host = port.empty(NUMEL, torch.float32), torch.empty(NUMEL)
    source = numbers()
    port.copy_in(source, target).wait()
    port.copy_out(target, host).synchronize()
    assert torch.equal(host, numbers())


# Events.


def test_a_function_is_called_once_when_its_copy_has_landed(port: DevicePort) -> None:
    calls, host = Calls(), port.empty_pinned(NUMEL, torch.float32)
    seen: list[torch.Tensor] = []
    copied = port.copy_out(there(port, numbers()), host)
    copied.then(lambda error: seen.append(host.clone()))
    copied.then(calls.note("landed"))
    calls.wait(1)
    assert copied.query()
    assert calls.errors == [None]
    assert (calls.threads == [threading.current_thread()]) is port.is_host
    assert torch.equal(seen[0], numbers())


def test_an_event_that_says_it_is_reached_is_reached(port: DevicePort) -> None:
    host = port.empty_pinned(NUMEL, torch.float32)
    copied = port.copy_out(there(port, numbers()) + 1, host)
    deadline_s = time.monotonic() + DEADLINE_S
    while not copied.query():
        assert time.monotonic() < deadline_s
    assert torch.equal(host, numbers(1))


def test_functions_are_called_in_order_also_when_one_raises(port: DevicePort, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(str(args.exc_value)))
    calls, names = Calls(), [str(number) for number in range(8)]

    def fail(error: Exception | None) -> None:
        raise OSError("planted")

    for name in names:
        port.record().then(calls.note(name))
        with contextlib.suppress(OSError):  # on the host it is raised here
            port.record().then(fail)
    calls.wait(len(names))
    assert calls.order == names
    assert {*raised} <= {"planted"}


def test_a_late_call_for_an_event_that_is_reached_is_made_too(port: DevicePort) -> None:
    calls, event = Calls(), port.record()
    event.synchronize()
    event.then(calls.note("late"))
    calls.wait(1)


def test_streams_wait_for_each_other_by_events(port: DevicePort) -> None:
    tensor = there(port, numbers())
    for _ in range(10):
        here = port.record()
        with port.side_stream("another"):
            here.wait()
            tensor += 1
            aside = port.record()
        aside.wait()
        tensor += 1
    assert torch.equal(back(port, tensor), numbers(20))


def test_a_thread_waits_for_what_another_has_submitted(port: DevicePort) -> None:
    def act() -> tuple[torch.Tensor, DeviceEvent]:
        with port.side_stream():
            return torch.full((NUMEL,), 3.0, device=port.device), port.record()

    tensor, done = in_thread(act)
    done.wait()
    assert torch.equal(back(port, tensor), torch.full((NUMEL,), 3.0))


def test_the_time_between_two_events_is_the_devices(port: DevicePort) -> None:
    tensor = there(port, numbers().view(256, 256))
    events = [port.record(timing=True)]
    for _ in range(2):
        for _ in range(4):
            tensor = tensor @ tensor
        events.append(port.record(timing=True, blocking=False))
    events[-1].synchronize()
    first, both = events[0].elapsed_s(events[1]), events[0].elapsed_s(events[2])
    assert 0 < first < both < DEADLINE_S
    without = port.record()
    without.synchronize()
    with pytest.raises(ValueError, match="timing=True"):
        without.elapsed_s(events[0])


# Streams.


def test_a_thread_has_a_stream_of_its_own_and_shares_those_with_names(port: DevicePort) -> None:
    def streams() -> list[Any]:
        found = [port.current_stream()]
        for name in ("", "", "shared"):
            with port.side_stream(name):
                found.append(port.current_stream())
        return [*found, port.current_stream()]

    barrier = threading.Barrier(2)

    def both_alive() -> list[Any]:
        barrier.wait(DEADLINE_S)
        try:
            return streams()
        finally:
            barrier.wait(DEADLINE_S)

    results: list[list[Any]] = []
    threads = [threading.Thread(target=lambda: results.append(both_alive())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    one, other = results
    if port.is_host:
        assert {*one, *other} == {None}
        return
    for outside, own, again, shared, after in results:
        assert outside == after
        assert own == again
        assert len({own, shared, outside}) == 3
    assert one[1] != other[1]
    assert one[3] == other[3]


def test_work_of_a_thread_is_done_when_it_has_synchronized(port: DevicePort) -> None:
    host = port.empty_pinned(NUMEL, torch.float32)
    tensor = there(port, numbers())
    host.copy_(tensor + 1, non_blocking=True)
    port.synchronize()
    assert torch.equal(host, numbers(1))


def test_memory_of_another_stream_may_be_used_here(port: DevicePort) -> None:
    with port.side_stream("another"):
        tensor = torch.ones(NUMEL, device=port.device)
        made = port.record()
    made.wait()
    port.record_stream(tensor)
    found = tensor + 1
    del tensor
    with port.side_stream("another"):
        torch.full((NUMEL,), -1.0, device=port.device)
    assert torch.equal(back(port, found), torch.full((NUMEL,), 2.0))


def test_no_graph_is_captured(port: DevicePort) -> None:
    assert port.is_capturing() is False


# Numbers and names.


def test_equal_seeds_draw_equal_numbers_on_the_device(port: DevicePort) -> None:
    def drawn(seed: int) -> torch.Tensor:
        port.manual_seed(seed)
        return torch.cat([back(port, torch.rand(100, device=port.device)) for _ in range(2)])

    assert torch.equal(drawn(7), drawn(7))
    assert not torch.equal(drawn(7), drawn(8))


def test_seeding_a_device_leaves_the_hosts_numbers_alone(port: DevicePort) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    port.manual_seed(9)
    torch.rand(4, device=port.device)
    assert torch.equal(torch.rand(4), expected) is not port.is_host


def test_a_device_says_what_it_is(port: DevicePort) -> None:
    found = port.describe()
    assert found == port.describe()
    assert (found.type, found.index) == (port.device.type, port.device.index)
    assert found.name
    if port.device.type == "cuda":
        assert found.uuid and found.capability and found.multiprocessors and found.runtime and found.cudnn
