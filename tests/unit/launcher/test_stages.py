"""A worker's life: what it was decides what its end means, and nothing that it says out of turn moves it."""

from __future__ import annotations

import pytest

from elastrain.launcher.core.worker_table import DEAD, DONE, IN_A_VIEW, TABLE, Course, Stage, follow


def after(*courses: Course) -> Stage:
    stage = Stage.STARTING
    for course in courses:
        stage = follow(stage, course)
    return stage


def test_an_ordinary_life() -> None:
    assert after(Course.FIT, Course.ENTER_AT_FIRST, Course.COMMIT, Course.FINISH, Course.DIE) is Stage.LEFT


def test_a_newcomer_is_one_until_its_first_commit() -> None:
    assert after(Course.FIT, Course.ENTER_LATER) is Stage.NEWCOMER
    assert after(Course.FIT, Course.ENTER_LATER, Course.COMMIT) is Stage.MEMBER


@pytest.mark.parametrize(
    ("courses", "end"),
    [
        ((), Stage.GONE),
        ((Course.UNFIT,), Stage.TURNED_AWAY),
        ((Course.FIT, Course.ENTER_AT_FIRST, Course.BE_LEFT_OUT), Stage.EVICTED),
        ((Course.FINISH,), Stage.LEFT),
        ((Course.FINISH, Course.BE_LATE), Stage.DROPPED),
        ((Course.BE_SURPLUS,), Stage.DROPPED),
        ((Course.BE_SURPLUS, Course.FINISH), Stage.DROPPED),
        ((Course.FIT, Course.ENTER_AT_FIRST, Course.BE_LATE), Stage.GONE),
        ((Course.FIT, Course.ENTER_AT_FIRST, Course.BE_LATE, Course.FINISH), Stage.DROPPED),
    ],
)
def test_what_a_worker_was_decides_what_its_end_means(courses: tuple[Course, ...], end: Stage) -> None:
    assert after(*courses, Course.DIE) is end


@pytest.mark.parametrize("stage", Stage)
def test_every_living_worker_can_die_and_the_dead_stay_dead(stage: Stage) -> None:
    assert follow(stage, Course.DIE) in DEAD
    assert stage not in DEAD or all(follow(stage, course) in DEAD for course in Course)


def test_every_stage_is_reached_and_those_of_a_view_live() -> None:
    assert {*TABLE.values(), Stage.STARTING} == set(Stage)
    assert not IN_A_VIEW & DEAD
    assert {Stage.LEFT} == DONE & DEAD
