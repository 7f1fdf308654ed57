"""Members that are slow for long get fewer runs, then their end; who recovers gets all again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.core.stragglers import deserved_quota
from elastrain.launcher.shared.job_values import Command, Kill
from elastrain.launcher.shared.notices import Speeds
from elastrain.protocol.agent_messages import Progress
from tests.unit.launcher.test_core import NOW, RING, Job, logged, of, running


class Played:
    """A job whose members commit a step each half a second."""

    def __init__(self) -> None:
        self.job = running(3)
        self.now, self.step = NOW, 0

    def go(self, for_s: float, **micro_batch_s: float | None) -> list[Command]:
        done: list[Command] = []
        until_s = self.now + for_s
        while self.now < until_s:
            self.now, self.step = self.now + 0.5, self.step + 1
            for member in self.job.ids:
                told = Progress(
                    step=self.step, loss=1.0, samples=1, holders=RING, micro_batch_s=micro_batch_s.get(member, 0.1)
                )
                done += self.job.say(member, told, self.now)
        return done

    def quotas(self) -> dict[str, int]:
        view = self.job.core.cluster.view
        return view.quotas if view else {}


def ended(commands: list[Command]) -> list[str]:
    return [kill.member for kill in of(Kill, commands)]


def test_a_straggler_gets_fewer_runs_after_ten_seconds_and_both_is_said() -> None:
    play = Played()
    commands = play.go(12.0, m1=0.2)
    assert play.quotas() == {}
    commands += play.go(6.0, m1=0.2)
    assert play.quotas() == {"m1": 2}
    assert [log.say for log in logged(commands, "quota")] == [
        "m1 takes 0.2 s for a micro-batch, the others 0.1 s: it gets 2 quarters of a share of the runs"
    ]
    assert ended(commands) == []
    assert ended(play.go(100.0, m1=0.2)) == [], "with half of the runs it is as fast as the others"


def test_a_straggler_that_stays_behind_with_the_smallest_share_is_ended_and_replaced() -> None:
    play = Played()
    commands = play.go(16.0, m1=0.9)
    assert play.quotas() == {"m1": 1} and ended(commands) == []
    commands = play.go(12.0, m1=0.9)
    assert ended(commands) == ["m1"]
    assert "m1 takes 0.9 s for a micro-batch" in of(Kill, commands)[0].reason


def test_a_straggler_for_whom_no_run_is_left_is_ended() -> None:
    play = Played()
    play.go(16.0, m1=0.5)
    assert ended(play.go(12.0, m1=None)) == ["m1"]


def test_who_has_recovered_gets_its_full_share_again() -> None:
    play = Played()
    play.go(16.0, m1=0.3)
    assert play.quotas() == {"m1": 1}
    commands = play.go(20.0)
    assert play.quotas() == {} and ended(commands) == []
    assert "its full share" in logged(commands, "quota")[0].say


def test_one_slow_step_or_a_slow_spell_is_forgiven_and_where_all_are_slow_nobody_is() -> None:
    play = Played()
    commands = play.go(8.0) + play.go(6.0, m1=5.0) + play.go(8.0)
    commands += play.go(60.0, m0=3.0, m1=3.1, m2=2.9)
    assert play.quotas() == {} and not logged(commands, "quota")


def test_differences_of_milliseconds_are_none() -> None:
    play = Played()
    play.go(60.0, m0=0.001, m1=0.004, m2=0.001)
    assert play.quotas() == {}


def test_members_of_other_nodes_are_compared_with_by_their_agents_word() -> None:
    play = Played()
    play.job.happen(ev.NoticeCame(node="node1", notice=Speeds(micro_batch_s={"m0": 0.1, "m2": 0.1})), play.now)
    for _ in range(60):  # the others commit elsewhere
        play.now, play.step = play.now + 0.5, play.step + 1
        play.job.say("m1", Progress(step=play.step, holders=RING, micro_batch_s=0.4), play.now)
    assert play.quotas() == {"m1": 1}


def test_the_only_holder_of_some_state_is_not_ended_however_slow() -> None:
    play = Played()
    alone = {"0": ("m1",), "1": ("m2", "m0")}
    for _ in range(120):
        play.now, play.step = play.now + 0.5, play.step + 1
        for member in play.job.ids:
            told = Progress(step=play.step, holders=alone, micro_batch_s=2.0 if member == "m1" else 0.1)
            assert ended(play.job.say(member, told, play.now)) == []


@pytest.mark.parametrize(
    ("ratio", "quota", "deserves"), [(1.0, 4, 4), (1.7, 4, 4), (2.0, 4, 2), (4.0, 4, 1), (2.0, 2, 2), (1.1, 2, 4)]
)
def test_a_quota_is_about_the_inverse_of_the_slowness(ratio: float, quota: int, deserves: int) -> None:
    assert deserved_quota(ratio, quota) == deserves


@settings(max_examples=200)
@given(ratio=st.floats(0.1, 100.0), quota=st.integers(1, 4))
def test_a_quota_settles_at_once(ratio: float, quota: int) -> None:
    once = deserved_quota(ratio, quota)
    assert 1 <= once <= 4
    assert deserved_quota(ratio, once) == once


def test_jobs_without_measurements_are_left_alone() -> None:
    job = Job(2)
    for n in range(2):
        job.hello(f"m{n}")
    for step in range(100):
        job.commit(step)
    assert not of(Kill, job.done)
