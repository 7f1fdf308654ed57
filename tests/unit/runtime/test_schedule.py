"""What the loader processes are asked for: what is waited for, then what comes next, never too much, nothing twice."""

from __future__ import annotations

from elastrain.runtime.loader.packing import Schedule


def _schedule(ahead: int = 3, micro_batches: int = 4) -> Schedule[str]:
    return Schedule(0, lambda step: range(micro_batches), ahead=ahead)


def test_the_plan_is_followed_into_the_next_step_and_no_further() -> None:
    assert list(_schedule(ahead=99, micro_batches=2).ahead()) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_what_is_under_way_or_loaded_is_bounded() -> None:
    schedule = _schedule()
    assert list(schedule.ahead()) == [(0, 0), (0, 1), (0, 2)]
    schedule.arrived((0, 1), "b")
    assert list(schedule.ahead()) == []
    assert schedule.take((0, 1)) == "b"
    assert list(schedule.ahead()) == [(0, 3)]


def test_so_few_are_under_way_that_no_message_waits_for_its_reader() -> None:
    schedule = _schedule(ahead=1000, micro_batches=1000)
    assert len(list(schedule.ahead())) == 64
    schedule.arrived((0, 0), "a")
    assert list(schedule.ahead()) == [(0, 64)]


def test_what_is_waited_for_is_asked_for_once() -> None:
    schedule = _schedule()
    assert schedule.want((0, 3))
    assert not schedule.want((0, 3)), "it is under way"
    assert list(schedule.ahead()) == [(0, 0), (0, 1)]
    assert not schedule.want((0, 0)), "it is under way"
    schedule.arrived((0, 0), "a")
    assert not schedule.want((0, 0)), "it is here"
    assert schedule.take((0, 0)) == "a"
    assert schedule.want((0, 0)), "it was handed out"


def test_what_was_taken_is_not_loaded_ahead_again() -> None:
    schedule = _schedule(ahead=1)
    schedule.want((0, 0))
    schedule.arrived((0, 0), "a")
    assert schedule.take((0, 0)) == "a"
    assert schedule.take((0, 0)) is None
    assert list(schedule.ahead()) == [(0, 1)]


def test_what_belongs_to_earlier_steps_is_let_go() -> None:
    schedule = _schedule(ahead=2)
    assert list(schedule.ahead()) == [(0, 0), (0, 1)]
    schedule.arrived((0, 0), "a")
    schedule.want((1, 2))
    schedule.arrived((0, 1), "late")
    assert schedule.take((0, 0)) is None and schedule.take((0, 1)) is None
    assert list(schedule.ahead()) == [(1, 0)]


def test_an_earlier_step_can_still_be_asked_for() -> None:
    schedule = _schedule(ahead=0)
    schedule.want((5, 0))
    assert schedule.want((2, 1))
    schedule.arrived((2, 1), "a")
    assert schedule.take((2, 1)) == "a"


def test_a_new_plan_keeps_what_is_at_hand() -> None:
    planned = [0, 1]
    schedule: Schedule[str] = Schedule(0, lambda step: planned, ahead=2)
    assert list(schedule.ahead()) == [(0, 0), (0, 1)]
    planned[:] = [3, 0]
    schedule.arrived((0, 0), "a")
    assert schedule.take((0, 0)) == "a"
    assert list(schedule.ahead()) == [(0, 3)]
