"""The order of requests, and that each one ends exactly once."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from elastrain.offload.drives.request_queue import IoRequest, Mark, RequestQueue, Urgency

DEADLINE_S = 10.0


class HeldQueue:
    """One worker, held at its first request until everything else is queued; then the order is seen."""

    def __init__(self, *, writers: int = 0) -> None:
        self.queue = RequestQueue("test", threads=1, writers=writers)
        self.order: list[str] = []
        self._busy, self._go = threading.Event(), threading.Event()
        self.queue.submit(Urgency.DEMAND, self._hold)
        assert self._busy.wait(DEADLINE_S)

    def _hold(self, _: IoRequest) -> None:
        self._busy.set()
        assert self._go.wait(DEADLINE_S)

    def submit(self, urgency: Urgency, name: str) -> IoRequest:
        def work(request: IoRequest) -> None:
            self.order.append(name + (" cancelled" if request.cancelled else ""))

        return self.queue.submit(urgency, work)

    def run(self) -> list[str]:
        self._go.set()
        self.queue.close(DEADLINE_S)
        return self.order


@pytest.fixture
def gate() -> Iterator[HeldQueue]:
    made = HeldQueue()
    yield made
    made.run()


def test_reads_go_before_writes_and_demands_before_both(gate: HeldQueue) -> None:
    gate.submit(Urgency.WRITE, "write 1")
    gate.submit(Urgency.WRITE, "write 2")
    gate.submit(Urgency.PREFETCH, "ahead 1")
    gate.submit(Urgency.PREFETCH, "ahead 2")
    gate.submit(Urgency.DEMAND, "demand")
    assert gate.run() == ["demand", "ahead 1", "ahead 2", "write 1", "write 2"]


def test_a_worker_for_writes_takes_them_first_and_reads_where_there_are_none() -> None:
    gate = HeldQueue(writers=1)
    gate.submit(Urgency.DEMAND, "demand")
    gate.submit(Urgency.WRITE, "write")
    assert gate.run() == ["write", "demand"]


def test_a_hastened_read_is_run_once_and_first(gate: HeldQueue) -> None:
    gate.submit(Urgency.PREFETCH, "ahead 1")
    late = gate.submit(Urgency.PREFETCH, "ahead 2")
    gate.queue.hasten(late)
    gate.queue.hasten(late)
    assert gate.run() == ["ahead 2", "ahead 1"]


def test_a_cancelled_request_still_reports_and_does_so_at_once(gate: HeldQueue) -> None:
    gate.submit(Urgency.DEMAND, "demand")
    write = gate.submit(Urgency.WRITE, "write")
    gate.queue.cancel(write)
    assert gate.run() == ["write cancelled", "demand"]


def test_closing_runs_what_was_submitted(gate: HeldQueue) -> None:
    for index in range(5):
        gate.submit(Urgency.WRITE, str(index))
    assert gate.run() == list("01234")


class Reached:
    """A mark of an accelerator, which is reached when a test says so."""

    def __init__(self) -> None:
        self.is_reached, self.is_awaited = threading.Event(), threading.Event()

    def query(self) -> bool:
        return self.is_reached.is_set()

    def synchronize(self) -> None:
        self.is_awaited.set()
        assert self.is_reached.wait(DEADLINE_S)


class BrokenMark(Reached):
    def query(self) -> bool:
        raise RuntimeError("an illegal memory access")

    synchronize = query  # type: ignore[assignment]


def ran(queue: RequestQueue, urgency: Urgency, mark: Mark | None = None) -> threading.Event:
    done = threading.Event()
    queue.submit(urgency, lambda _: done.set(), mark)
    return done


@pytest.mark.parametrize("writers", [0, 1])
def test_what_is_not_computed_yet_holds_nobody_up(writers: int) -> None:
    queue, marks = RequestQueue("test", threads=2, writers=writers), [Reached() for _ in range(3)]
    writes = [ran(queue, Urgency.WRITE, each) for each in marks]
    assert marks[0].is_awaited.wait(DEADLINE_S)  # by one worker; the other one is free
    for urgency in (Urgency.PREFETCH, Urgency.DEMAND, Urgency.WRITE):
        assert ran(queue, urgency).wait(DEADLINE_S)
    assert not any(each.is_set() for each in writes)
    assert not marks[1].is_awaited.is_set()
    for mark, done in zip(marks, writes, strict=True):
        mark.is_reached.set()
        assert done.wait(DEADLINE_S)
    queue.close(DEADLINE_S)


def test_a_demand_that_cannot_be_read_yet_lets_others_pass() -> None:
    queue, mark = RequestQueue("test", threads=2), Reached()
    demand = ran(queue, Urgency.DEMAND, mark)
    assert mark.is_awaited.wait(DEADLINE_S)
    assert ran(queue, Urgency.PREFETCH).wait(DEADLINE_S)
    assert not demand.is_set()
    mark.is_reached.set()
    assert demand.wait(DEADLINE_S)
    queue.close(DEADLINE_S)


def test_a_cancelled_request_does_not_wait_for_its_mark() -> None:
    queue, first, second = RequestQueue("test", threads=2), Reached(), Reached()
    before, cancelled = ran(queue, Urgency.WRITE, first), threading.Event()
    request = queue.submit(Urgency.WRITE, lambda _: cancelled.set(), second)
    queue.cancel(request)
    assert cancelled.wait(DEADLINE_S)
    first.is_reached.set()
    assert before.wait(DEADLINE_S)
    queue.close(DEADLINE_S)


def test_a_mark_that_fails_lets_the_request_say_so_and_closing_waits_for_marks() -> None:
    queue, mark = RequestQueue("test", threads=1), Reached()
    assert ran(queue, Urgency.WRITE, BrokenMark()).wait(DEADLINE_S)
    last = ran(queue, Urgency.WRITE, mark)
    assert mark.is_awaited.wait(DEADLINE_S)
    threading.Timer(0.05, mark.is_reached.set).start()
    queue.close(DEADLINE_S)
    assert last.is_set()


def test_a_request_that_is_taken_while_another_worker_begins_to_wait_for_it_is_run_once() -> None:
    """The mark is reached between the look of the one and the wait of the other."""
    queue, mark, ran_by = RequestQueue("test", threads=0), Reached(), list[str]()
    request = queue.submit(Urgency.WRITE, lambda _: ran_by.append("once"), mark)
    awaited = queue._take((queue._writes, queue._others))
    assert awaited is mark
    mark.is_reached.set()
    taken = queue._take((queue._writes, queue._others))
    assert taken is request
    taken.work(taken)
    queue._await(mark)
    assert (ran_by, queue._is_awaited) == (["once"], False)
