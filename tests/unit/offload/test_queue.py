"""The order of requests, and that each one ends exactly once."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from elastrain.offload.queue import IoRequest, RequestQueue, Urgency

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
