"""Seconds of blocks: what a member measures, when it tells them, and what it has heard."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain import protocol as p
from elastrain.member.pipeline.measures import Measures
from elastrain.pipeline.actions import ActionKind, TaskAction
from elastrain.pipeline.pipeline_plan import Task
from elastrain.pipeline.planner.plan_vote import PlanVote, ToldMemory
from elastrain.pipeline.planner.step_profile import WINDOW, BlockSeconds

TASK = Task(0, 2, 4, "a")


def computed(kind: ActionKind, *took_s: float, task: Task = TASK) -> p.Computed:
    return p.Computed(step=0, action=TaskAction(kind, 0, task), made=None, is_last=False, took_s=took_s)


def measured(measures: Measures, *steps: tuple[float, float, float]) -> None:
    """Each step: seconds of two forwards, and of the whole backward."""
    for first_s, second_s, back_s in steps:
        measures.note(computed(ActionKind.FORWARD, first_s, second_s))
        measures.note(computed(ActionKind.BACKWARD, back_s))
        measures.begin()


def test_a_backward_is_divided_in_proportion_to_the_forwards() -> None:
    measures = Measures()
    measured(measures, *[(1.0, 3.0, 8.0)] * WINDOW)
    assert dict(measures.news(None).seconds) == {
        2: BlockSeconds(forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=1.0),
        3: BlockSeconds(forward_s=3.0, input_gradient_s=3.0, weight_gradient_s=3.0),
    }


def test_nothing_is_told_twice_and_one_noisy_step_is_no_news() -> None:
    measures = Measures()
    measured(measures, *[(1.0, 1.0, 4.0)] * (WINDOW - 1))
    assert measures.news(None).seconds == (), "fewer measurements would follow the first noisy steps"
    measured(measures, (1.0, 1.0, 4.0))
    assert len(measures.news(None).seconds) == 2
    measured(measures, (9.0, 9.0, 36.0))
    assert measures.news(None).seconds == ()
    measured(measures, *[(2.0, 2.0, 8.0)] * 4)
    assert [block for block, _ in measures.news(None).seconds] == [2, 3]


def test_a_block_that_was_not_computed_for_a_step_is_measured_anew() -> None:
    measures = Measures()
    measured(measures, *[(1.0, 1.0, 4.0)] * WINDOW)
    measures.news(None)
    for _ in range(2):
        measures.note(computed(ActionKind.FORWARD, 5.0, task=Task(0, 2, 3, "a")))
        measures.begin()
    measured(measures, (5.0, 5.0, 20.0))
    assert 3 not in dict(measures.news(None).seconds)


def test_a_forward_without_times_says_nothing() -> None:
    measures = Measures()
    measures.note(computed(ActionKind.FORWARD))
    measures.note(computed(ActionKind.BACKWARD, 4.0))
    measures.begin()
    assert measures.news(None).seconds == ()


MEMORY = ToldMemory(limit_bytes=1000, base_bytes=200, taken_bytes=500)


def test_after_a_change_of_view_everything_is_told_anew() -> None:
    measures = Measures()
    measured(measures, *[(1.0, 3.0, 8.0)] * WINDOW)
    first = measures.news(None)
    measures.hear("b", first)
    assert measures.of({"b": {2, 9}, "c": {3}}) == {"b": {2: dict(first.seconds)[2]}}
    for member in "bc":
        measures.hear(member, PlanVote(rates=(("a", 5e6),), memory=MEMORY))
    measures.forget_view(("a", "c"))
    assert measures.of({"b": {2}}) == {"b": {2: dict(first.seconds)[2]}}, "no other member may have measured its blocks"
    assert measures.told_rates.keys() == measures.memory.keys() == {"c"}, "of living members, what they have told"
    assert measures.news(None) == first


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_times_that_no_clock_can_show_are_dropped(seconds: float) -> None:
    measures = Measures()
    measured(measures, *[(1.0, 1.0, 4.0)] * WINDOW)
    measures.news(None)
    measured(measures, *[(seconds, 1.0, 4.0)] * WINDOW)
    assert 2 not in dict(measures.news(None).seconds)


def beside(measures: Measures, *actions: tuple[float, float, float]) -> None:
    """A step of actions: seconds before each, seconds of the loop's thread, and those of its block."""
    for waited_s, spent_s, took_s in actions:
        event = computed(ActionKind.FORWARD, took_s, task=Task(0, 2, 3, "a"))
        measures.note(replace(event, host_s=(waited_s, spent_s)))
    measures.begin()


def test_what_an_action_takes_beside_its_blocks_and_how_long_a_step_is_waited_for_is_told() -> None:
    measures = Measures()
    for _ in range(WINDOW):
        # The second action waits for another member, the third follows at once.
        beside(measures, (0.5, 1.25, 1.0), (7.0, 1.25, 1.0), (0.125, 1.5, 1.0))
    assert dict(measures.news(None).rates) == {"step_s": 0.5, "action_s": pytest.approx(1 / 3 + 0.125)}
    assert measures.news(None).rates == (), "nothing is told twice"
    beside(measures, (0.5, 9.0, 1.0), (9.0, 9.0, 1.0))
    assert measures.news(None).rates == (), "one noisy step is no news"
    measures.forget_view(())
    assert len(measures.news(None).rates) == 2


def test_actions_that_are_told_together_share_the_time_of_the_thread() -> None:
    measures = Measures()
    for _ in range(WINDOW):
        for _ in range(2):
            measures.note(replace(computed(ActionKind.FORWARD, 1.0, 1.0), host_s=(0.25, 4.5)))
            measures.note(computed(ActionKind.BACKWARD, 2.0))
        measures.begin()
    assert dict(measures.news(None).rates)["action_s"] == 0.25 + 0.25


def test_rates_of_links_are_told_by_sender() -> None:
    measures = Measures()
    for rate in (4e6, 5e6, 100e6, 5e6, 5e6):
        measures.note_links({"b": rate})
    assert measures.news(None).rates == (("b", 5e6),)
    assert measures.hear("a", PlanVote(rates=(("b", 5e6),)))
    assert measures.told_rates == {"a": {"b": 5e6}}


def test_memory_is_told_once_and_again_when_the_room_for_blocks_has_changed_by_more_than_noise() -> None:
    measures = Measures()
    first = ToldMemory(limit_bytes=1000, base_bytes=200, taken_bytes=500)
    measures.note_memory(first)
    assert measures.news(None).memory == first
    for limit_bytes, is_told in [(1000, False), (1010, False), (1060, True), (1050, False), (900, True)]:
        measures.note_memory(replace(first, limit_bytes=limit_bytes))
        assert (measures.news(None).memory is not None) == is_told
    measures.forget_view(())
    assert measures.news(None).memory is not None, "newcomers have heard nothing"
