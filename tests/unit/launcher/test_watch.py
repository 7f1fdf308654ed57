"""Who is taken to hang: simulated workers, looked at ten times a second, of which some stand still."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastrain.base.thread_status import Station, ThreadStatus
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.shared.job_values import Command, Kill, TakeStacks, TellNodes
from elastrain.launcher.shared.notices import Hangs, MemberWaits
from elastrain.protocol.agent_messages import Progress, WaitReason
from tests.unit.launcher.test_core import NOW, Job, logged, of, running

LOOK_S, BUSY_LOOK_S = 0.1, 0.5
"""How often an agent looks, and how rarely a busy one may, for all of the time to count."""
LONG_S = 100.0
"""What takes longer is played with a busy agent: a look costs as much whatever it covers."""
IDLE = Station.WAITING
BUSY = (Station.COMPUTING, Station.BETWEEN, Station.DECLARED)
DEVICE = "late:0 (Late Test Device, late-1)"


@dataclass
class Acted:
    """What one worker's threads and device do: they move with each look unless they stand."""

    place: Station = Station.COMPUTING
    allowed_s: float = 0.0
    stands: bool = False
    engine_stands: bool = False
    stopped: bool = False
    starves: bool = False
    device: Station = Station.OUTSIDE
    """Place of the device's oldest work; OUTSIDE: the worker computes on the host."""
    device_stands: bool = False
    device_allowed_s: float = 0.0
    count: int = 0
    engine_count: int = 0
    device_count: int = 0
    starved_s: float = 0.0

    def look(self, member: str, passed_s: float) -> ev.Seen:
        self.count += not (self.stands or self.stopped)
        self.engine_count += not (self.engine_stands or self.stopped)
        self.device_count += self.device in BUSY and not (self.device_stands or self.stopped)
        self.starved_s += passed_s * self.starves
        loop = ThreadStatus(count=self.count, place=self.place, allowed_s=self.allowed_s, step=7, name="saving")
        engine = ThreadStatus(count=self.engine_count, place=Station.TURNING)
        name = "" if self.device is Station.OUTSIDE else DEVICE
        work = ThreadStatus(
            count=self.device_count, place=self.device, allowed_s=self.device_allowed_s, step=6, name=name
        )
        return ev.Seen(
            member=member,
            loop=ev.SeenThread(spot=loop, starved_s=self.starved_s),
            engine=ev.SeenThread(spot=engine, starved_s=self.starved_s),
            device=ev.SeenThread(spot=work, starved_s=self.starved_s),
            stopped=self.stopped,
        )


@dataclass
class Played:
    """A job whose members have committed steps of `step_s`, and the time that goes on."""

    step_s: float = 0.1
    steps: int = 5
    job: Job = field(default_factory=lambda: running(3))
    now: float = NOW

    def __post_init__(self) -> None:
        self.acted = {member: Acted() for member in self.job.ids}
        for step in range(1, self.steps + 1):
            self.now += self.step_s
            self.commit(step)

    def commit(self, step: int) -> None:
        for member in self.job.ids:
            self.job.say(member, Progress(step=step, loss=1.0, samples=1, holders=None), self.now)

    def go(self, for_s: float) -> list[Command]:
        """What follows in this time."""
        done: list[Command] = []
        until_s, look_s = self.now + for_s, BUSY_LOOK_S if for_s > LONG_S else LOOK_S
        while self.now < until_s:
            self.now += look_s
            done += self.job.happen(ev.Looked(seen=tuple(a.look(m, look_s) for m, a in self.acted.items())), self.now)
            done += self.job.do(self.job.core.on_tick(self.now))
        return done

    def all_but(self, member: str, **state: Any) -> None:
        for other, acted in self.acted.items():
            if other != member:
                for name, value in state.items():
                    setattr(acted, name, value)


def killed(commands: list[Command]) -> list[str]:
    return [kill.member for kill in of(Kill, commands)]


@pytest.mark.parametrize(
    "how",
    [
        {"stopped": True},
        {"stands": True},
        {"stands": True, "engine_stands": True},
        {"place": Station.WAITING, "engine_stands": True},
        {"place": Station.WAITING, "stands": True, "device": Station.COMPUTING, "device_stands": True},
        {"stands": True, "device": Station.COMPUTING, "device_stands": True},
        {"device": Station.COMPUTING, "device_stands": True},
        {"place": Station.WAITING, "engine_stands": True, "device": Station.COMPUTING, "device_stands": True},
        {"stands": True, "device": IDLE},
    ],
    ids=[
        "stopped",
        "a loop in a forward",
        "a held interpreter lock",
        "an engine at a stuck drive",
        "a device while the loop waits for others",
        "a device while the loop waits for it",
        "a device while the loop goes on",
        "a device while the engine waits for it",
        "a loop in a forward, whose device has nothing to do",
    ],
)
@pytest.mark.parametrize("step_s", [0.05, 2.0])
def test_a_member_that_stands_while_others_wait_is_ended_within_its_bound(how: dict[str, Any], step_s: float) -> None:
    play = Played(step_s=step_s)
    play.all_but("m1", place=IDLE, stands=True)
    for name, value in how.items():
        setattr(play.acted["m1"], name, value)
    assert killed(play.go(3.0 if step_s < 1 else 3 * step_s)) == ["m1"] or killed(play.go(0.5)) == ["m1"]


def test_before_a_member_is_ended_the_stacks_of_all_are_taken_on_all_nodes() -> None:
    play = Played()
    play.all_but("m1", place=IDLE, stands=True)
    play.acted["m1"].stopped = True
    play.job.say("m0", WaitReason(step=6, reason="no vote of m1 yet"))
    commands = play.go(4.0)
    assert logged(commands, "hang")[0].fields["waits_for"] == {"m0": "no vote of m1 yet"}
    kinds = [type(c) for c in commands if isinstance(c, TakeStacks | Kill | TellNodes)]
    assert kinds.index(TakeStacks) < kinds.index(Kill)
    assert [type(c.message) for c in of(TellNodes, commands)] == [Hangs]
    assert of(TakeStacks, commands)[0].reason.startswith("m1 hangs: no sign of life for 2.")
    assert killed(commands) == ["m1"]


def test_a_member_that_goes_on_while_stacks_are_taken_is_not_ended() -> None:
    play = Played()
    play.all_but("m1", place=IDLE, stands=True)
    play.acted["m1"].stands = True
    while not logged(play.go(LOOK_S), "hang"):
        assert play.now < NOW + 60
    play.acted["m1"].stands = False
    commands = play.go(5.0)
    assert killed(commands) == []
    assert len(logged(commands, "hang_over")) == 1


def test_who_has_starved_or_was_not_looked_at_has_not_stood_still() -> None:
    play = Played()
    play.all_but("m1", place=IDLE, stands=True)
    play.acted["m1"] = Acted(stands=True, starves=True)
    assert killed(play.go(60.0)) == []
    play.acted["m1"] = Acted(stands=True, count=99)
    play.go(1.0)
    play.now += 3600.0  # the machine slept
    assert logged(play.go(0.5), "hang") == []


def test_where_all_stand_alike_nobody_is_ended_for_half_an_hour() -> None:
    play = Played()
    play.all_but("", place=Station.BETWEEN, stands=True)
    assert killed(play.go(1790.0)) == []
    assert killed(play.go(20.0))


def test_a_declared_stretch_has_its_own_bound_and_a_stopped_process_none() -> None:
    play = Played()
    play.all_but("m1", place=IDLE, stands=True)
    play.acted["m1"] = Acted(place=Station.DECLARED, allowed_s=60.0, stands=True, engine_stands=True)
    assert killed(play.go(59.0)) == []
    commands = play.go(3.0)
    assert killed(commands) == ["m1"]
    assert "in saving" in of(TakeStacks, commands)[0].reason
    play = Played()
    play.all_but("m1", place=IDLE, stands=True)
    play.acted["m1"] = Acted(place=Station.DECLARED, allowed_s=60.0, stopped=True)
    assert killed(play.go(4.0)) == ["m1"]


@pytest.mark.parametrize(
    ("how", "is_named"),
    [
        ({"place": Station.BETWEEN, "stands": True}, True),
        ({"place": Station.BETWEEN, "stands": True, "engine_stands": True}, True),
        ({"place": Station.COMPUTING, "stands": True}, False),
        ({"place": Station.BETWEEN, "stopped": True}, False),
    ],
    ids=["between two steps", "a held interpreter lock between two steps", "in a micro-batch", "stopped"],
)
def test_who_takes_long_between_two_steps_reads_that_job_phase_gives_more_time(
    how: dict[str, Any], is_named: bool
) -> None:
    play = Played()
    play.all_but("m1", place=IDLE, stands=True)
    play.acted["m1"] = Acted(**how)
    [taken] = of(TakeStacks, play.go(31.0))[:1]
    advice = 'than 30 s belongs into job.evaluate(…), or `with job.phase("…", timeout=…)`'
    assert (advice in taken.reason) == is_named, taken.reason
    assert ("job.evaluate(…)" in taken.reason) == is_named
    assert ("job.phase" in taken.reason) == is_named


def test_an_engine_that_a_declared_stretch_keeps_from_turning_is_not_blamed() -> None:
    """A checkpoint may hold the interpreter for all of its time."""
    play = Played()
    play.all_but("m0", place=IDLE, stands=True)
    play.acted["m0"] = Acted(place=Station.DECLARED, allowed_s=30.0, stands=True, engine_stands=True)
    assert killed(play.go(29.0)) == []


def test_first_steps_have_a_bound_of_their_own() -> None:
    job = Job(3)
    for n in range(3):
        job.hello(f"m{n}")
    play = Played(steps=0, job=job)
    play.all_but("m1", place=IDLE, stands=True)
    play.acted["m1"].stands = True
    assert killed(play.go(595.0)) == []
    assert killed(play.go(10.0)) == ["m1"]


def test_before_the_pace_is_known_a_member_that_has_committed_has_a_minute() -> None:
    play = Played(steps=1)
    play.all_but("m1", place=IDLE, stands=True)
    play.acted["m1"].stands = True
    assert killed(play.go(59.0)) == []
    assert killed(play.go(3.0)) == ["m1"]


def test_the_only_holder_of_some_state_is_waited_for_and_that_is_said_once() -> None:
    play = Played()
    holders = {"0": ("m1",), "1": ("m0", "m2"), "2": ("m2", "m0")}
    for member in play.job.ids:
        play.job.commit(6, member, holders=holders)
    play.all_but("m1", place=IDLE, stands=True)
    play.acted["m1"].stopped = True
    commands = play.go(100.0)
    assert killed(commands) == []
    assert len(logged(commands, "hang_spared")) == 1
    assert killed(play.go(1800.0)) == ["m1"]


def test_of_two_that_hang_and_hold_one_state_together_one_is_waited_for() -> None:
    play = Played()
    holders = {"0": ("m1", "m2"), "1": ("m0", "m1"), "2": ("m0", "m1")}
    for member in play.job.ids:
        play.job.commit(6, member, holders=holders)
    play.acted["m0"] = Acted(place=IDLE, stands=True)
    play.acted["m1"].stopped = play.acted["m2"].stopped = True
    assert killed(play.go(20.0)) == ["m1"]


def test_who_are_found_one_look_after_the_other_are_ended_together() -> None:
    """Else the second one, which waits for the first in a collective, raises there before its own end."""
    play = Played()
    for member in play.job.ids:
        play.job.commit(6, member, holders=dict.fromkeys("012", ("m0", "m1", "m2")))
    play.acted["m0"] = Acted(place=IDLE, stands=True)
    play.acted["m1"].stands = True
    play.go(2.5 * LOOK_S)
    play.acted["m2"].stands = True
    ended: list[list[str]] = []
    while not ended:
        assert play.now < NOW + 60
        ended += [found] if (found := killed(play.go(LOOK_S))) else []
    assert ended == [["m1", "m2"]]


def test_a_longer_micro_batch_that_was_healthy_is_learned_from() -> None:
    play = Played()
    play.acted["m1"].stands = True
    play.go(4.0)  # the others computed, too: nobody waited
    play.acted["m1"].stands = False
    play.go(1.0)
    play.all_but("m1", place=IDLE, stands=True)
    play.acted["m1"].stands = True
    assert killed(play.go(5.0)) == []
    assert killed(play.go(3.0)) == ["m1"]


def test_another_agents_word_that_somebody_waits_is_enough_and_grows_old() -> None:
    play = Played()
    play.acted["m1"].stands = True
    assert killed(play.go(10.0)) == []
    play.job.happen(ev.NoticeCame(node="node1", notice=MemberWaits()), play.now)
    assert killed(play.go(1.0)) == ["m1"]
    play.acted["m2"].stands = True
    play.acted["m1"].stands = False
    assert killed(play.go(10.0)) == []


def test_a_hang_timeout_of_zero_judges_nobody() -> None:
    play = Played(job=running(3, hang_timeout_s=0.0))
    play.all_but("m1", place=IDLE, stands=True)
    play.acted["m1"].stopped = True
    assert killed(play.go(4000.0)) == []


def test_what_sigkill_cannot_end_at_once_counts_as_dead_all_the_same() -> None:
    play = Played()
    play.all_but("m1", place=IDLE, stands=True)
    play.acted["m1"].stopped = True
    play.go(6.0)
    assert "m1" not in play.job.ids


def device_hangs(play: Played, **state: Any) -> None:
    """Let the members of a job on devices wait for m1, whose device stands still."""
    play.all_but("", place=IDLE, stands=True, device=IDLE)
    play.acted["m1"] = replace(play.acted["m1"], **{"device": Station.COMPUTING, "device_stands": True, **state})


def until_killed(play: Played) -> float:
    began_s = play.now
    while not killed(play.go(LOOK_S)):
        assert play.now < began_s + LONG_S
    return play.now - began_s


@pytest.mark.parametrize("step_s", [0.05, 2.0])
def test_a_device_that_stands_is_found_as_soon_as_a_loop_and_the_log_names_it(step_s: float) -> None:
    play = Played(step_s=step_s)
    play.all_but("m1", place=IDLE, stands=True)
    play.acted["m1"].stands = True
    loop_s = until_killed(play)
    play = Played(step_s=step_s)
    device_hangs(play)
    commands: list[Command] = []
    began_s = play.now
    while not killed(commands):
        commands += play.go(LOOK_S)
    assert play.now - began_s <= loop_s + 0.5
    (log,) = logged(commands, "hang")
    assert (log.fields["member"], log.fields["device"]) == ("m1", DEVICE)
    said = f"while its device {DEVICE} does not finish the work that was submitted in a micro-batch of step 6"
    assert said in of(TakeStacks, commands)[0].reason
    assert killed(commands) == ["m1"]


def test_an_engine_that_may_wait_for_its_device_names_it() -> None:
    play = Played()
    device_hangs(play, device=IDLE, engine_stands=True)
    (log,) = logged(play.go(3.0), "hang")
    assert log.fields["device"] == DEVICE
    assert f"its engine too (unfinished work of its device {DEVICE}, a held interpreter lock" in log.fields["where"]
    play = Played()
    play.all_but("m1", place=IDLE, stands=True)
    play.acted["m1"].engine_stands = True
    (log,) = logged(play.go(3.0), "hang")
    assert "device" not in log.fields and "its engine too (a held interpreter lock, or a drive)" in log.fields["where"]


def test_a_loop_that_hangs_beside_a_device_that_works_is_found_once_the_work_has_landed() -> None:
    play = Played()
    play.all_but("", place=IDLE, stands=True, device=IDLE)
    play.acted["m1"] = Acted(stands=True, device=Station.COMPUTING)
    assert killed(play.go(20.0)) == []
    play.acted["m1"].device = IDLE
    commands = play.go(1.0)
    assert killed(commands) == ["m1"]
    assert "device" not in logged(commands, "hang")[0].fields


def test_slow_work_of_a_device_that_lands_now_and_then_is_not_a_hang_and_is_learned_from() -> None:
    play = Played()
    device_hangs(play)
    for _ in range(4):
        assert killed(play.go(2.0)) == []
        play.acted["m1"].device_count += 1
    play.acted["m0"].place = play.acted["m2"].place = Station.COMPUTING
    play.acted["m0"].stands = play.acted["m2"].stands = False
    play.go(4.0)  # nobody waits
    play.acted["m1"].device_count += 1
    play.all_but("m1", place=IDLE, stands=True)
    assert killed(play.go(5.0)) == []
    assert killed(play.go(3.0)) == ["m1"]


def test_who_waits_for_its_own_device_does_not_wait_for_others() -> None:
    play = Played(job=running(2))
    device_hangs(play)
    play.acted["m0"] = replace(play.acted["m1"])
    assert killed(play.go(600.0)) == [], "both devices stand alike"
    play = Played(job=running(2))
    device_hangs(play)
    play.acted["m0"] = replace(play.acted["m1"], device_stands=False)
    assert killed(play.go(60.0)) == []
    play.acted["m0"].device = IDLE
    assert killed(play.go(0.5)) == [], "it has waited for less than a second"
    assert killed(play.go(1.5)) == ["m1"]


@pytest.mark.parametrize(
    ("state", "limit_s", "said"),
    [
        ({"device": Station.DECLARED, "device_allowed_s": 60.0}, 60.0, "submitted in a declared phase"),
        ({"device": Station.BETWEEN}, 30.0, "submitted in the script's code between two steps"),
        ({"place": Station.DECLARED, "allowed_s": 50.0}, 50.0, "submitted in a micro-batch"),
        ({"place": Station.BETWEEN}, 30.0, "submitted in a micro-batch"),
    ],
    ids=["submitted in a phase", "between steps", "while the loop is in a phase", "while it is between steps"],
)
def test_declared_stretches_count_for_the_device_too(state: dict[str, Any], limit_s: float, said: str) -> None:
    play = Played()
    device_hangs(play, **state)
    assert killed(play.go(limit_s - 1.0)) == []
    commands = play.go(3.0)
    assert killed(commands) == ["m1"]
    assert said in of(TakeStacks, commands)[0].reason


def test_who_cannot_tell_of_landings_has_its_whole_time_again() -> None:
    """A checkpoint that holds the interpreter for long stops the thread that tells of landings."""
    play = Played()
    device_hangs(play, place=Station.DECLARED, allowed_s=60.0, engine_stands=True)
    assert killed(play.go(30.0)) == []
    play.acted["m1"] = Acted(device=Station.COMPUTING, device_stands=True, count=9, engine_count=9)
    assert killed(play.go(2.0)) == []
    assert killed(play.go(2.0)) == ["m1"]


def test_before_the_first_commit_a_device_has_the_time_of_a_first_step() -> None:
    job = Job(3)
    for n in range(3):
        job.hello(f"m{n}")
    play = Played(steps=0, job=job)
    device_hangs(play)
    assert killed(play.go(595.0)) == []
    assert killed(play.go(10.0)) == ["m1"]


def test_work_outside_of_the_jobs_steps_is_not_judged() -> None:
    play = Played()
    device_hangs(play, place=Station.OUTSIDE, device=Station.OUTSIDE)
    assert killed(play.go(600.0)) == []


# A healthy job, whatever its members do in turn: each stretch shorter than its own bound, or starved, or shared by all.
_ON_DEVICES = {"late": 2.0, "late between": 29.0, "late in a phase": 118.0, "landing": 300.0, "untold": 118.0}
"""What devices do, and for how long a healthy one may."""
_STRETCHES = st.lists(
    st.tuples(
        st.sampled_from(["m0", "m1", "m2", "all"]),
        st.sampled_from(["short", "between", "declared", "starved", "moving", *_ON_DEVICES]),
        st.floats(0.0, 1.0),
    ),
    max_size=12,
)
_BOUNDS_S = {"short": 2.0, "between": 29.0, "declared": 118.0, "starved": 300.0, "moving": 300.0, **_ON_DEVICES}
_DONE: dict[str, dict[str, Any]] = {
    "short": {"place": Station.COMPUTING, "stands": True},
    "between": {"place": Station.BETWEEN, "stands": True, "engine_stands": True},
    "declared": {"place": Station.DECLARED, "allowed_s": 120.0, "stands": True, "engine_stands": True},
    "starved": {"place": Station.COMPUTING, "stands": True, "engine_stands": True, "starves": True},
    "moving": {"place": Station.COMPUTING},
    "late": {"place": IDLE, "stands": True, "device": Station.COMPUTING, "device_stands": True},
    "late between": {"place": IDLE, "stands": True, "device": Station.BETWEEN, "device_stands": True},
    "late in a phase": {
        "place": IDLE,
        "stands": True,
        "device": Station.DECLARED,
        "device_stands": True,
        "device_allowed_s": 120.0,
    },
    "landing": {"stands": True, "device": Station.COMPUTING},
    "untold": {
        "place": Station.DECLARED,
        "allowed_s": 120.0,
        "stands": True,
        "engine_stands": True,
        "device": Station.COMPUTING,
        "device_stands": True,
    },
}


@settings(max_examples=settings().max_examples // 4, deadline=None)
@given(stretches=_STRETCHES, step_s=st.floats(0.01, 5.0))
def test_no_member_of_a_healthy_job_is_ever_ended(stretches: list[tuple[str, str, float]], step_s: float) -> None:
    play = Played(step_s=step_s)
    for number, (who, what, part) in enumerate(stretches, start=10):
        for member, acted in play.acted.items():
            does = _DONE[what] if who in (member, "all") else {"place": IDLE, "stands": True}
            fresh = Acted(count=acted.count + 1, engine_count=acted.engine_count + 1, starved_s=acted.starved_s)
            fresh.device, fresh.device_count = IDLE, acted.device_count + 1
            for name, value in does.items():
                setattr(fresh, name, value)
            play.acted[member] = fresh
        assert killed(play.go(part * _BOUNDS_S[what])) == []
        play.commit(number)


def test_the_only_worker_that_is_stopped_is_named_within_seconds_although_nobody_waits() -> None:
    play = Played(job=running(1))
    play.acted["m0"].stopped = True
    (said,) = logged(play.go(4.0), "hang_spared")
    assert "m0 hangs: no sign of life for 2." in said.say
    assert "it is waited for, up to 1800 s. Let it go on with: kill -CONT" in said.say
    assert said.say in play.job.core.cluster.progress.recent.texts
    play.acted["m0"].stopped = False
    assert logged(play.go(4.0), "hang_spared") == []
    assert play.job.core.cluster.spared == []


def test_who_waits_in_vain_for_the_state_of_a_stopped_member_uses_up_no_restart() -> None:
    play = Played(job=running(2, max_restarts=1))
    job = play.job
    job.commit(6, "m0", holders={"0": ("m0", "m1")})
    job.die("m1")
    job.hello("m2")
    play.acted = {"m0": Acted(stopped=True), "m2": Acted(place=IDLE, stands=True)}
    assert len(logged(play.go(4.0), "hang_spared")) == 1
    commands = job.die("m2")
    assert "it waited for the state of m0: no restart is used up" in logged(commands, "replace")[0].say
    assert job.core.cluster.workers.restarts_used == 1
    job.hello("m3")
    play.acted["m3"] = Acted(place=IDLE, stands=True)
    play.go(2.0)
    assert job.ids == ("m0",), "nobody could give it the state"
    play.acted["m0"].stopped = False
    play.go(0.5)
    assert job.ids == ("m0", "m3")
