"""Copies come as late as they may, and work that no event orders is refused with its operator and its streams."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import late


def device() -> Any:
    return torch.get_device_module("late")


def side_of(work: Callable[[], Any]) -> tuple[Any, Any]:
    """Do something on a stream of its own. Returns the stream, and an event behind the work."""
    stream = device().Stream()
    with stream:
        work()
    return stream, stream.record_event()


def test_a_copy_out_holds_nan_until_somebody_waits_for_it() -> None:
    values, host = torch.arange(4.0, device="late"), torch.zeros(4)
    host.copy_(values, non_blocking=True)
    values += 1  # its stream goes on, and the host has still waited for nothing
    assert host.isnan().all()
    device().current_stream().synchronize()
    assert host.tolist() == [0, 1, 2, 3]


def test_integers_that_have_not_landed_are_wrong_too() -> None:
    values = torch.arange(4, device="late"), torch.tensor([True, False], device="late")
    numbers, flags = (each.to("cpu", non_blocking=True) for each in values)
    assert numbers.tolist() != [0, 1, 2, 3] and flags.tolist() != [True, False]
    device().synchronize()
    assert numbers.tolist() == [0, 1, 2, 3] and flags.tolist() == [True, False]


def test_a_copy_in_reads_the_host_when_the_device_needs_it() -> None:
    host, other = torch.zeros(4), torch.zeros(4, device="late")
    values = torch.empty(4, device="late").copy_(host, non_blocking=True)
    host.fill_(7)  # too early: the source is reused
    other += 1
    assert (values + other).tolist() == [8] * 4


def test_a_copy_in_reads_what_an_earlier_copy_out_of_its_stream_brings() -> None:
    host = torch.zeros(4)
    host.copy_(torch.ones(4, device="late"), non_blocking=True)
    assert torch.empty(4, device="late").copy_(host, non_blocking=True).tolist() == [1] * 4


def test_a_blocking_copy_is_there_when_it_returns() -> None:
    host = torch.zeros(4)
    values = torch.zeros(4, device="late").copy_(host)
    host.fill_(7)
    assert values.cpu().tolist() == [0] * 4


def test_an_event_is_asked_more_than_once_before_it_is_done() -> None:
    event = device().Event()
    assert event.query(), "an event without a record is done"
    host = torch.ones(2, device="late").to("cpu", non_blocking=True)
    event.record()
    assert not event.query() and host.isnan().all()
    assert event.query() and host.tolist() == [1, 1]
    late.configure(patience=3)
    torch.ones(2, device="late")
    event.record()
    assert [event.query() for _ in range(4)] == [False, False, False, True]


def test_an_event_lets_land_what_its_stream_has_waited_for() -> None:
    host = torch.zeros(2)
    values = torch.ones(2, device="late")
    _, copied = side_of(
        lambda: (device().current_stream().wait_stream(device().default_stream()), host.copy_(values, True))
    )
    device().current_stream().wait_event(copied)
    later = device().current_stream().record_event()
    later.synchronize()
    assert host.tolist() == [1, 1]


@pytest.mark.parametrize("is_written_first", [True, False])
def test_work_of_two_streams_without_an_event_is_refused(is_written_first: bool) -> None:
    values = torch.zeros(8, device="late")
    device().synchronize()
    first, second = (values.add_, values.sum) if is_written_first else (values.sum, values.add_)
    side, _ = side_of(lambda: first(*[1] * is_written_first))
    with pytest.raises(late.RaceError) as raised:
        second(*[1] * (not is_written_first))
    words = ["aten::sum", f"stream {side.number}", "aten::add_.Tensor", "stream 0", "has not waited"]
    assert all(word in str(raised.value) for word in words), raised.value
    assert late.races() == [str(raised.value)]


@pytest.mark.parametrize("how", ["wait_event", "wait_stream", "wait", "synchronize", "query", "device"])
def test_each_way_to_wait_is_an_edge(how: str) -> None:
    values = torch.zeros(8, device="late")
    device().synchronize()
    side, event = side_of(lambda: values.add_(1))
    waits: dict[str, Callable[[], Any]] = {
        "wait_event": lambda: device().current_stream().wait_event(event),
        "wait_stream": lambda: device().current_stream().wait_stream(side),
        "wait": event.wait,
        "synchronize": event.synchronize,
        "query": lambda: (event.query(), event.query()),
        "device": torch.accelerator.synchronize,
    }
    waits[how]()
    assert values.add_(1).sum().item() == 16 and late.races() == []


def test_two_streams_may_read_the_same_and_write_elsewhere() -> None:
    values = torch.zeros(8, device="late")
    device().synchronize()
    side_of(lambda: values[:4].add_(1))
    values[4:].add_(1)
    device().synchronize()
    side_of(values.sum)
    assert values.sum().item() == 8


def test_an_event_that_was_recorded_too_early_orders_nothing() -> None:
    values = torch.zeros(8, device="late")
    device().synchronize()
    side = device().Stream()
    early = side.record_event()
    with side:
        values.add_(1)
    device().current_stream().wait_event(early)
    with pytest.raises(late.RaceError):
        values.add_(1)


def test_host_memory_of_a_copy_is_watched_among_copies() -> None:
    host, values = torch.zeros(8), torch.ones(8, device="late")
    device().synchronize()
    side_of(partial(host.copy_, values, True))
    with pytest.raises(late.RaceError, match="host memory"):
        torch.empty(8, device="late").copy_(host, non_blocking=True)


def test_memory_that_is_freed_under_a_copy_is_found() -> None:
    values, host = torch.ones(8, device="late"), torch.zeros(8)
    device().synchronize()
    _, event = side_of(partial(host.copy_, values, True))
    del values
    with pytest.raises(late.RaceError, match="was freed while copy out on stream"):
        torch.ones(8, device="late")
    event.synchronize()


@pytest.mark.parametrize("how", ["record_stream", "waited", "landed", "own stream"])
def test_memory_may_be_freed_once_nobody_needs_it(how: str) -> None:
    host = torch.zeros(8)
    values = torch.ones(8, device="late")
    device().synchronize()
    if how == "own stream":
        host.copy_(values, non_blocking=True)
    else:
        side, event = side_of(partial(host.copy_, values, True))
    if how == "record_stream":
        values.record_stream(side)
    elif how == "waited":
        device().current_stream().wait_event(event)
    elif how == "landed":
        event.synchronize()
    del values
    torch.ones(8, device="late")
    device().synchronize()
    assert host.tolist() == [1] * 8 and late.races() == []


def _after(hand: Callable[[Callable[[], None]], None]) -> None:
    """Wait in another thread for work of a stream, and go on in this one after `hand`."""
    values = torch.zeros(8, device="late")
    device().synchronize()
    _, event = side_of(lambda: values.add_(1))
    hand(event.synchronize)
    values.add_(1)


def test_a_wait_of_one_thread_is_no_wait_of_another() -> None:
    def hand(wait: Callable[[], None]) -> None:
        done: list[bool] = []
        thread = threading.Thread(target=lambda: (wait(), done.append(True)))
        thread.start()
        while not done:
            pass

    with pytest.raises(late.RaceError):
        _after(hand)


class Handover:
    """A class that passes something between threads in a way that the device does not know."""

    def __init__(self) -> None:
        self._given: list[object] = []

    def give(self, value: object) -> None:
        self._given.append(value)

    def take(self) -> object:
        while not self._given:
            pass
        return self._given.pop()


def test_what_threads_hand_over_orders_them() -> None:
    def by_queue(wait: Callable[[], None]) -> None:
        handed: queue.Queue[object] = queue.Queue()
        threading.Thread(target=lambda: (wait(), handed.put(1))).start()
        handed.get()

    def by_event(wait: Callable[[], None]) -> None:
        handed = threading.Event()
        threading.Thread(target=lambda: (wait(), handed.set())).start()
        handed.wait()

    def by_join(wait: Callable[[], None]) -> None:
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()

    def by_handover(wait: Callable[[], None]) -> None:
        handed = Handover()
        threading.Thread(target=lambda: (wait(), handed.give(1))).start()
        handed.take()

    with pytest.raises(late.RaceError):
        _after(by_handover)
    late.races(forget=True)
    late.handing_over(Handover, gives=["give"], takes=["take"])
    for hand in (by_queue, by_event, by_join, by_handover):
        _after(hand)
    assert late.races() == []


def test_a_thread_begins_with_what_its_maker_knew() -> None:
    values = torch.zeros(8, device="late")
    device().synchronize()
    _, event = side_of(lambda: values.add_(1))
    event.synchronize()
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(values.add_(1).sum().item()))
    thread.start()
    thread.join()
    assert seen == [16]


def test_hooks_run_on_a_thread_of_autograd_and_on_the_stream_of_the_backward() -> None:
    seen: list[Any] = []
    layer = nn.Linear(4, 4).to("late")
    layer.weight.register_post_accumulate_grad_hook(
        lambda _: seen.append((threading.get_ident(), device().current_stream()))
    )
    side = device().Stream()
    side.wait_stream(device().default_stream())
    with side:
        given = torch.ones(2, 4, device="late")
        loss = layer(given).sum()
        kernels = late.stats(threading.current_thread().name)["kernels"]
        loss.backward()
    ((thread, stream),) = seen
    assert thread != threading.get_ident() and stream == side
    assert late.stats(threading.current_thread().name)["kernels"] > kernels, "the backward's count here, too"
    assert late.races() == []


def test_the_clock_of_the_device_is_its_own() -> None:
    begin, end = (device().Event(enable_timing=True) for _ in range(2))
    late.configure(slowness=1e6)
    values = torch.ones(64, 64, device="late")
    begin.record()
    for _ in range(10):
        values = values @ values.softmax(0)
    end.record()
    with pytest.raises(RuntimeError, match="not ready"):
        begin.elapsed_time(end)
    end.synchronize()
    assert begin.elapsed_time(end) > 10_000, "which no host has waited"
    with pytest.raises(ValueError, match="enable_timing"):
        begin.elapsed_time(device().Event())


def test_kernels_of_many_threads_and_streams_keep_their_bits() -> None:
    made: dict[int, Tensor] = {}

    def work(number: int) -> None:
        with device().Stream():
            values = torch.full((16, 16), 1 / (number + 1), device="late", requires_grad=True)
            for _ in range(5):
                (values.softmax(0) @ values).sum().backward()
            assert values.grad is not None
            made[number] = values.grad.cpu()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, grad in made.items():
        values = torch.full((16, 16), 1 / (number + 1), requires_grad=True)
        for _ in range(5):
            (values.softmax(0) @ values).sum().backward()
        assert values.grad is not None and torch.equal(values.grad, grad)
    assert len(made) == 6 and late.races() == []
