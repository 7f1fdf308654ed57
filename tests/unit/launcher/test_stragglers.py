"""Members that stay hopelessly slow are ended; what the members agree upon about shares is told."""

from __future__ import annotations

from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.shared.job_values import Command, Kill
from elastrain.launcher.shared.notices import Speeds
from elastrain.protocol.agent_messages import Progress, SharesChanged
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


def ended(commands: list[Command]) -> list[str]:
    return [kill.member for kill in of(Kill, commands)]


def test_a_straggler_that_still_gets_runs_is_left_to_the_members() -> None:
    play = Played()
    generation = play.job.core.cluster.view
    assert ended(play.go(100.0, m1=0.5)) == []
    assert play.job.core.cluster.view == generation, "shares change by records, and not by views"


def test_a_hopeless_straggler_is_ended_and_replaced_after_ten_seconds() -> None:
    play = Played()
    assert ended(play.go(12.0, m1=0.9)) == []
    commands = play.go(6.0, m1=0.9)
    assert ended(commands) == ["m1"]
    assert "m1 takes 0.9 s for a micro-batch, the others 0.1 s, and stays that slow" in of(Kill, commands)[0].reason


def test_a_straggler_for_whom_no_run_is_left_is_ended() -> None:
    play = Played()
    assert ended(play.go(16.0, m1=0.3)) == []
    assert ended(play.go(12.0, m1=None)) == ["m1"]


def test_a_member_without_runs_that_was_not_slow_is_left_alone() -> None:
    play = Played()
    play.go(16.0)
    assert ended(play.go(60.0, m1=None)) == []


def test_one_slow_step_or_a_slow_spell_is_forgiven_and_where_all_are_slow_nobody_is() -> None:
    play = Played()
    commands = play.go(8.0) + play.go(6.0, m1=5.0) + play.go(8.0)
    commands += play.go(60.0, m0=3.0, m1=3.1, m2=2.9)
    assert ended(commands) == []


def test_differences_of_milliseconds_are_none() -> None:
    assert ended(Played().go(60.0, m0=0.0001, m1=0.004, m2=0.0001)) == []


def test_members_of_other_nodes_are_compared_with_by_their_agents_word() -> None:
    play = Played()
    play.job.happen(ev.NoticeCame(node="node1", notice=Speeds(micro_batch_s={"m0": 0.1, "m2": 0.1})), play.now)
    done: list[Command] = []
    for _ in range(60):  # the others commit elsewhere
        play.now, play.step = play.now + 0.5, play.step + 1
        done += play.job.say("m1", Progress(step=play.step, holders=RING, micro_batch_s=0.9), play.now)
    assert ended(done) == ["m1"]


def test_the_only_holder_of_some_state_is_not_ended_however_slow() -> None:
    play = Played()
    alone = {"0": ("m1",), "1": ("m2", "m0")}
    for _ in range(120):
        play.now, play.step = play.now + 0.5, play.step + 1
        for member in play.job.ids:
            told = Progress(step=play.step, holders=alone, micro_batch_s=2.0 if member == "m1" else 0.1)
            assert ended(play.job.say(member, told, play.now)) == []


def test_other_shares_are_told_to_people() -> None:
    play = Played()
    (log,) = logged(play.job.say("m0", SharesChanged(step=3, reason="m1 is slow"), play.now), "shares")
    assert log.say == "m1 is slow"
    assert play.job.core.cluster.progress.recent.texts[-1] == "m1 is slow"


def test_jobs_without_measurements_are_left_alone() -> None:
    job = Job(2)
    for n in range(2):
        job.hello(f"m{n}")
    for step in range(100):
        job.commit(step)
    assert not of(Kill, job.done)
