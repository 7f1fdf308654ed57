"""The time of an action: blocks of a forward where they are entered, and what holds the whole action up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest

from elastrain.device import same_memory
from elastrain.device.same_memory import HOST
from elastrain.pipeline.actions import ActionKind
from elastrain.pipeline.pipeline_plan import Task
from elastrain.runtime.loop.action_timer import ActionTimer, LoopClock
from tests.support import pipeline_steps
from tests.support.pipeline_models import CASES


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with patch.object(same_memory, "time", clock):
        yield clock


def forward(clock: Clock, timer: ActionTimer, *stretches: tuple[int, float], held_s: float = 0.0) -> None:
    @contextmanager
    def computing() -> Iterator[None]:
        clock.now_s += held_s
        yield

    with timer.around(computing):
        for place, seconds in stretches:
            timer.enter(place)
            clock.now_s += seconds
        timer.end()
        clock.now_s += 100.0


def test_each_block_of_the_task_has_the_time_until_the_next_is_entered(clock: Clock) -> None:
    timer = ActionTimer(HOST, Task(0, 1, 3, "a"))
    forward(clock, timer, (0, 7.0), (1, 1.0), (2, 3.0), (3, 5.0), (4, 5.0))
    assert timer.forward_s() == (1.0, 3.0)


def test_a_block_that_is_entered_twice_has_both_times(clock: Clock) -> None:
    timer = ActionTimer(HOST, Task(0, 1, 3, "a"))
    forward(clock, timer, (1, 1.0), (2, 3.0), (1, 0.5))
    assert timer.forward_s() == (1.5, 3.0)


def test_what_holds_up_the_whole_action_is_divided_among_its_blocks(clock: Clock) -> None:
    timer = ActionTimer(HOST, Task(0, 1, 3, "a"))
    forward(clock, timer, (1, 1.0), (2, 3.0), held_s=4.0)
    assert timer.forward_s() == (2.0, 6.0)


def test_a_forward_that_enters_no_block_has_no_times(clock: Clock) -> None:
    timer = ActionTimer(HOST, Task(0, 1, 3, "a"))
    forward(clock, timer, (0, 7.0))
    assert timer.forward_s() == ()


def test_a_backward_is_timed_as_a_whole(clock: Clock) -> None:
    timer = ActionTimer(HOST, Task(0, 1, 3, "a"))
    assert timer.backward_s() == ()
    with timer.around(nullcontext):
        clock.now_s += 2.0
        timer.begin()
        timer.end()
    assert timer.backward_s() == (2.0,)


def test_members_of_a_pipeline_tell_how_long_each_action_took() -> None:
    told: dict[tuple[str, ActionKind], set[int]] = {}
    take = pipeline_steps.DeskHandover._take

    def heard(handover: pipeline_steps.DeskHandover, message: object) -> None:
        if isinstance(message, pipeline_steps.BoundaryMade):
            event = message.event
            assert all(seconds > 0 for seconds in event.took_s)
            # A forward with the loss and its backward are told together, and have one time of the thread.
            assert (event.host_s[1] > 0) == (
                (event.action.task.member, event.action.kind) != ("b", ActionKind.BACKWARD)
            )
            told.setdefault((event.action.task.member, event.action.kind), set()).add(len(event.took_s))
        take(handover, message)

    with patch.object(pipeline_steps.DeskHandover, "_take", heard):
        pipeline_steps.in_pipelines(CASES["gpt"], pipeline_steps.chain(("a", "b"), (2,), 5), ("a", "b"), 1)
    assert told["a", ActionKind.FORWARD] == {2}
    assert told["b", ActionKind.FORWARD].isdisjoint({0, 1})
    assert told["a", ActionKind.BACKWARD] == told["b", ActionKind.BACKWARD] == {1}


def test_the_loops_clock_tells_waits_from_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([0.0, 2.0, 5.0, 6.0, 10.0])
    monkeypatch.setattr("elastrain.runtime.loop.action_timer.time.monotonic", lambda: next(now_s))
    clock = LoopClock()
    for expected in ((2.0, 3.0), (1.0, 4.0)):
        clock.begin()
        assert clock.end() == expected
