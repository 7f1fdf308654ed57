"""The work of an agent's members and the pace of the job, as people are shown them."""

from __future__ import annotations

import pytest

from elastrain.launcher.agent.run_state import describe
from elastrain.launcher.core.watching.members_work import MembersWork, StepPace
from elastrain.launcher.core.watching.recent_reasons import RecentReasons
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.shared.job_values import TellNodes
from elastrain.launcher.shared.notices import WorkShared
from elastrain.launcher.shared.operator_messages import problem_of
from elastrain.protocol.agent_messages import CheckpointEnded, Progress, WorkTold
from tests.unit.launcher.test_core import NOW, Job, running


def worked(job: Job, member: str, now: float, step: int = 4) -> None:
    job.say(member, Progress(step=step, loss=1.0, micro_batch_s=0.25, holders=None), now)
    job.say(member, WorkTold(until=10, micro_batches=3.0, memory_bytes=50, memory_limit_bytes=100), now)


def test_the_state_has_pace_end_share_and_memory() -> None:
    job = running(2)
    for step in range(4):
        worked(job, "m0", NOW + 2 * step, step)
    state = describe(job.core, "job", NOW + 6)
    assert problem_of(state) == ""
    assert (state["until"], state["steps_per_minute"], state["remaining_s"]) == (10, 30.0, 12.0)
    known = {"micro_batches": 3.0, "micro_batch_s": 0.25, "memory_bytes": 50, "memory_limit_bytes": 100}
    assert known.items() <= state["members"][0].items()
    assert state["members"][1]["memory_bytes"] is None


def test_a_step_that_does_not_end_lowers_the_pace() -> None:
    pace = StepPace()
    assert pace.per_minute(0.0) is None
    for step in range(5):
        pace.commit(step, float(step))
        pace.commit(step, step + 0.5)  # told by another member, later
    assert pace.per_minute(4.5) == pytest.approx(60.0)
    assert pace.per_minute(13.0) == pytest.approx(20.0)


def test_the_pace_forgets_steps_of_more_than_a_minute_ago() -> None:
    pace = StepPace()
    for step in range(10):
        pace.commit(step, 100.0 * step)
    pace.commit(10, 900.5)
    assert pace.per_minute(900.5) == pytest.approx(60 * 2 / 100.5)


def test_other_nodes_hear_of_the_work_once_a_second_and_show_it() -> None:
    here, there = MembersWork(alone=False), MembersWork(alone=False)
    worker, told = Worker(id="m0", slot=0, initial=True), WorkTold(until=10, micro_batches=3.0)
    here.on_work(worker, told)
    commands = [here.on_progress(worker, Progress(step=step), NOW + 0.4 * step) for step in range(6)]
    (first,), (second,) = (each for each in commands if each)
    assert isinstance(first, TellNodes) and isinstance(first.message, WorkShared) and first == second
    there.on_shared(first.message)
    assert there.of("m0")["micro_batches"] == 3.0
    alone = MembersWork(alone=True)
    alone.on_work(worker, told)
    assert alone.on_progress(worker, Progress(step=0), NOW) == []


def test_reasons_and_the_checkpoint_have_ages() -> None:
    job = running(2)
    job.say("m0", CheckpointEnded(step=3, size_bytes=9, took_s=0.5), NOW + 1)
    job.say("m0", CheckpointEnded(step=4, reason="no space"), NOW + 2)
    state = describe(job.core, "job", NOW + 5)
    assert (state["checkpoint"], state["checkpoint_ago_s"]) == (3, 4.0)
    assert state["reasons"][-1].endswith("because no space") and state["reasons_ago_s"][-1] == 3.0


def test_the_oldest_reasons_are_dropped() -> None:
    recent = RecentReasons()
    for number in range(12):
        recent.at(float(number))
        recent.add(str(number))
    assert recent.texts == [str(number) for number in range(4, 12)]
    assert recent.ago_s(11.0)[0] == 7.0


def test_a_dead_worker_is_forgotten() -> None:
    job = running(2)
    worked(job, "m0", NOW)
    job.core.cluster.work.forget("m0")
    assert job.core.cluster.work.of("m0")["memory_bytes"] is None
