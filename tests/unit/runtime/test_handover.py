"""The two queues between the training loop and the engine."""

from __future__ import annotations

import threading

import pytest

from elastrain import protocol as p
from elastrain.errors import DivergedError, StoppedError
from elastrain.job.values import Contribution
from elastrain.pipeline.actions import ActionKind, TaskAction
from elastrain.pipeline.pipeline_plan import Task
from elastrain.runtime.io.loop_channel import Assignment, BoundaryMade, LoopChannel, LoopOver, TryAgain

COMPUTE = p.Compute(step=0, run=1)
WORK = Assignment(COMPUTE, "slot")  # type: ignore[arg-type]  # any slot


def handover() -> tuple[LoopChannel, list[str]]:
    woken: list[str] = []
    return LoopChannel(lambda: woken.append("woken")), woken


def test_what_is_told_wakes_the_engine_and_is_taken_in_order() -> None:
    between, woken = handover()
    between.tell(p.Ready())
    between.tell(TryAgain(COMPUTE))
    assert woken == ["woken", "woken"]
    assert between.has_news
    assert list(between.take()) == [p.Ready(), TryAgain(COMPUTE)]
    assert not between.has_news
    between.tell(p.Ready(), TryAgain(COMPUTE))
    assert woken == ["woken"] * 3, "once for what is told together"
    assert list(between.take()) == [p.Ready(), TryAgain(COMPUTE)]


def test_what_is_told_while_the_engine_takes_is_taken_too() -> None:
    between, _ = handover()
    between.tell(p.Ready())
    taken = []
    for told in between.take():
        taken.append(told)
        if len(taken) < 3:
            between.tell(p.LoopEnded(step=len(taken)))
    assert taken == [p.Ready(), p.LoopEnded(step=1), p.LoopEnded(step=2)]


def test_boundary_tensors_are_taken_before_the_gradients_that_were_told_before_them() -> None:
    between, _ = handover()
    task = Task(run=0, begin=1, end=2, member="m1")
    done = p.BlockDone(step=0, run=0, block=1, contribution=Contribution(), touched=1)
    computed = p.Computed(step=0, action=TaskAction(ActionKind.BACKWARD, 0, task), made=None, is_last=True)
    made = BoundaryMade(event=computed, tensors=())
    for told in (done, made, p.Ready()):
        between.tell(told)
    assert list(between.take()) == [made, done, p.Ready()]


def test_a_boundary_tensor_is_not_taken_before_the_end_of_the_action_in_front_of_its_own() -> None:
    """What the engine takes before that is of the action in front, which may be void."""
    between, _ = handover()
    task = Task(run=0, begin=1, end=2, member="m1")
    done = p.BlockDone(step=0, run=0, block=1, contribution=Contribution(), touched=1)
    computed = p.Computed(step=0, action=TaskAction(ActionKind.BACKWARD, 0, task), made=None, is_last=True)
    made = BoundaryMade(event=computed, tensors=())
    told = [done, made, p.Submitted(), p.Ready(), done, made, p.Ready()]
    for each in told:
        between.tell(each)
    assert list(between.take()) == [made, done, p.Submitted(), p.Ready(), made, done, p.Ready()]


def test_asking_for_work_waits_for_the_engine() -> None:
    between, _ = handover()

    def engine() -> None:
        while not between.has_news:
            pass
        assert list(between.take()) == [p.Ready()]
        between.give(WORK)

    thread = threading.Thread(target=engine)
    thread.start()
    assert between.next_work() == WORK
    thread.join(10)


def test_a_second_try_ends_with_the_job() -> None:
    between, _ = handover()
    between.give(LoopOver())
    with pytest.raises(StoppedError, match="the job has ended"):
        between.try_again(WORK)


def test_what_was_given_comes_before_what_ended_the_engine_and_the_first_reason_counts() -> None:
    between, _ = handover()
    between.give(WORK)
    between.end(DivergedError("m1 differs"))
    between.end(StoppedError("closed"))
    assert between.wait() == WORK
    for _ in range(3):
        with pytest.raises(DivergedError, match="m1 differs"):
            between.wait()


def test_an_engine_that_was_closed_says_so() -> None:
    between, _ = handover()
    between.end()
    with pytest.raises(StoppedError, match="the engine has ended"):
        between.wait()
