"""What the agent decides, event by event, without processes: the core is fed by hand and its commands are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

from elastrain.job.world import Member
from elastrain.launcher.agent.run_state import describe
from elastrain.launcher.core import Core
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.core.worker_table import Stage
from elastrain.launcher.faults import grammar
from elastrain.launcher.faults.fault import Fault
from elastrain.launcher.shared.job_values import (
    AskLauncher,
    Command,
    End,
    FullPriority,
    Kill,
    Log,
    Propose,
    PutRoster,
    PutSpec,
    Start,
    Strike,
    TakeNumber,
    Tell,
)
from elastrain.protocol import agent_messages as am
from elastrain.protocol.agent_messages import (
    Diverged,
    Failed,
    Finished,
    FromWorker,
    Hello,
    LostState,
    NoRoom,
    Note,
    Progress,
    Redone,
    Suspect,
    WaitReason,
)
from tests.support.agents import job_config

C = TypeVar("C", bound=Command)
NOW = 1000.0
FINISHED = End(code=0, sentence="finished after step 0", everywhere=False)
RING = {"0": ("m0", "m1"), "1": ("m1", "m2"), "2": ("m2", "m0")}


class Job:
    """A core with a store that takes every proposal, and the commands that it gave."""

    def __init__(self, workers: int = 3, faults: Sequence[Fault] = (), **config: Any) -> None:
        self.core = Core(job_config(workers=workers, **config), faults, choose=lambda members: members[-1])
        self.done: list[Command] = []
        self.number = workers
        self.happen(ev.NodeRegistered(record=self.core.cluster.peers.record))

    def do(self, commands: Sequence[Command]) -> list[Command]:
        """Does what the store does; returns all commands, those that followed from its answers in their place."""
        new: list[Command] = []
        for command in commands:
            self.done.append(command)
            new += [command, *self.do(self.answer(command))]
        return new

    def answer(self, command: Command) -> list[Command]:
        match command:
            case PutRoster():
                return self.core.handle(ev.RosterStands(roster=command.roster), NOW)
            case PutSpec():
                return self.core.handle(ev.SpecStands(spec=dict(command.spec)), NOW)
            case TakeNumber():
                self.number += 1
                return self.core.handle(ev.NumberTaken(number=self.number - 1), NOW)
            case Propose():
                return self.core.handle(ev.ProposalAnswered(view=command.view), NOW)
        return []

    def happen(self, event: ev.Event, now: float = NOW) -> list[Command]:
        return self.do(self.core.handle(event, now))

    def say(self, member: str, message: FromWorker, now: float = NOW) -> list[Command]:
        return self.happen(ev.WorkerSpoke(member=member, message=message), now)

    def hello(self, member: str, now: float = NOW, **spec: Any) -> list[Command]:
        hello = Hello(member=member, address=f"unix:{member}", spec=spec or {"seed": 0})
        return self.say(member, hello, now)

    def commit(self, step: int, *members: str, holders: dict[str, tuple[str, ...]] | None = None) -> None:
        for member in members or self.ids:
            self.say(member, Progress(step=step, loss=1.0, samples=step, holders=holders))

    def die(self, member: str, exit_code: int = -9, now: float = NOW) -> list[Command]:
        died = self.happen(ev.WorkerDied(member=member, source="mutex", at_s=now), now)
        return died + self.happen(ev.WorkerExited(member=member, exit_code=exit_code), now)

    @property
    def ids(self) -> tuple[str, ...]:
        assert self.core.cluster.view is not None
        return self.core.cluster.view.ids

    @property
    def generation(self) -> int:
        return self.core.cluster.view.generation if self.core.cluster.view else 0


def running(workers: int = 3, **config: Any) -> Job:
    """A job whose first view has committed a step."""
    job = Job(workers, **config)
    for n in range(workers):
        job.hello(f"m{n}")
    job.commit(0, holders=RING if workers == 3 else None)
    return job


def of(kind: type[C], commands: Sequence[Command]) -> list[C]:
    return [command for command in commands if isinstance(command, kind)]


def told(commands: Sequence[Command], kind: type[am.ToWorker]) -> list[str]:
    return [c.member for c in of(Tell, commands) if isinstance(c.message, kind)]


def logged(commands: Sequence[Command], event: str) -> list[Log]:
    return [c for c in of(Log, commands) if c.event == event]


def test_begin_starts_every_worker_at_full_priority() -> None:
    starts = of(Start, Job(2).done)
    assert [(s.member, s.slot, s.rank, s.warm_up) for s in starts] == [("m0", 0, 0, False), ("m1", 1, 1, False)]


def test_first_view_comes_with_the_last_hello_in_order_of_slots() -> None:
    job = Job(3)
    assert of(PutSpec, job.hello("m2")) == [PutSpec(spec={"seed": 0})]
    assert not of(Propose, job.hello("m0"))
    commands = job.hello("m1")
    assert job.ids == ("m0", "m1", "m2")
    assert told(commands, am.NewView) == ["m0", "m1", "m2"]
    assert job.core.cluster.view is not None
    assert of(Tell, commands)[-1].message == am.NewView(view=job.core.cluster.view)
    third = Member(id="m2", node="node0", address="unix:m2")
    assert (job.core.cluster.view.generation, job.core.cluster.view.members[2]) == (1, third)


def test_death_edits_the_view_before_the_restart_and_the_new_worker_warms_up() -> None:
    job = running()
    died = job.happen(ev.WorkerDied(member="m1", source="mutex", at_s=NOW))
    assert job.ids == ("m0", "m2")
    assert told(died, am.NewView) == ["m0", "m2"]
    ended = job.happen(ev.WorkerExited(member="m1", exit_code=-9))
    assert of(Start, ended) == [Start(member="m3", slot=1, rank=2, restarts=1, warm_up=True, world_size=3)]
    joined = job.hello("m3")
    assert job.ids == ("m0", "m2", "m3")
    kinds = [type(c) for c in joined if isinstance(c, FullPriority | Tell)]
    assert kinds == [FullPriority, Tell, Tell, Tell]


def test_newcomers_that_are_started_together_expect_one_rank_each() -> None:
    job = running()
    for member in ("m0", "m1"):
        job.happen(ev.WorkerDied(member=member, source="mutex", at_s=NOW))
    exited = [c for m in ("m0", "m1") for c in job.happen(ev.WorkerExited(member=m, exit_code=-9))]
    assert [(s.member, s.rank, s.world_size) for s in of(Start, exited)] == [("m3", 1, 3), ("m4", 2, 3)]


def test_worker_that_is_started_again_before_the_first_view_has_the_same_rank_in_it() -> None:
    job = Job(3)
    job.hello("m1")
    assert [(s.member, s.slot, s.rank) for s in of(Start, job.die("m0"))] == [("m3", 0, 0)]
    job.hello("m2")
    job.hello("m3")
    assert job.ids == ("m3", "m1", "m2")


def test_joiner_that_warms_up_for_long_gets_full_priority_before_it_is_ready() -> None:
    job = running(warm_up_s=15.0)
    job.die("m1")
    assert job.do(job.core.on_tick(NOW + 14)) == []
    assert job.do(job.core.on_tick(NOW + 15)) == [FullPriority(member="m3")]
    assert of(FullPriority, job.hello("m3")) == [FullPriority(member="m3", ahead=True)]


def test_newcomer_goes_ahead_of_the_others_until_it_has_committed_its_first_step() -> None:
    job = running()
    job.die("m1")
    assert of(FullPriority, job.hello("m3")) == [FullPriority(member="m3", ahead=True)]
    assert of(FullPriority, job.say("m3", Progress(step=4))) == [FullPriority(member="m3")]
    assert not of(FullPriority, job.say("m3", Progress(step=5)))


def test_joiner_that_dies_is_not_given_priority_later() -> None:
    job = running(warm_up_s=15.0, max_restarts=1)
    job.die("m1")
    job.die("m3")
    assert job.do(job.core.on_tick(NOW + 15)) == []


def test_death_is_handled_once_whatever_reports_it_again() -> None:
    job = running()
    job.happen(ev.WorkerDied(member="m1", source="mutex", at_s=NOW))
    assert job.happen(ev.WorkerDied(member="m1", source="pidfd", at_s=NOW)) == []


def test_a_view_that_is_not_newer_changes_nothing() -> None:
    job = running()
    assert job.core.cluster.view is not None
    assert job.core.handle(ev.ViewStands(view=job.core.cluster.view), NOW) == []


def test_whether_a_shard_is_lost_with_its_holders_is_said_by_the_members_that_remain() -> None:
    job = running()
    job.die("m0")
    assert not of(End, job.die("m1"))
    assert job.ids == ("m2",)
    assert of(End, job.say("m2", LostState(sentence="shard 0 is gone"))) == [
        End(code=1, sentence="shard 0 is gone", lost=True)
    ]


def test_what_a_member_says_of_lost_state_that_is_no_longer_in_the_view_ends_nothing() -> None:
    job = running()
    job.die("m0")
    assert not of(End, job.say("m0", LostState(sentence="shard 0 is gone")))


def test_restarts_end_with_the_budget_and_the_job_goes_on() -> None:
    job = running(max_restarts=1)
    job.die("m0")
    job.hello("m3")
    job.commit(1, holders={"0": ("m1", "m3"), "1": ("m1", "m2"), "2": ("m2", "m1")})
    commands = job.die("m3")
    assert not of(Start, commands)
    assert "all 1 restarts are used up" in logged(commands, "no_restart")[0].say
    assert job.ids == ("m1", "m2")


def test_restart_no_longer_counts_an_hour_after_the_replacement_has_committed() -> None:
    job = running(max_restarts=1)
    job.die("m0")
    job.hello("m3")
    assert job.do(job.core.on_tick(NOW + 3600)) == []
    assert job.core.cluster.workers.restarts_used == 1  # it has not done anything yet
    job.say("m3", Progress(step=1), NOW + 5000)
    job.do(job.core.on_tick(NOW + 8599))
    assert job.core.cluster.workers.restarts_used == 1
    job.do(job.core.on_tick(NOW + 8600))
    assert describe(job.core, "job", NOW)["restarts_left"] == 1
    assert of(Start, job.die("m3"))[0].restarts == 2


def test_joiner_that_dies_while_warming_up_is_started_again() -> None:
    job = running()
    job.die("m1")
    assert of(Start, job.die("m3", exit_code=1))[0].member == "m4"
    assert job.generation == 2


def test_restart_that_fails_costs_only_that_member() -> None:
    job = running()
    job.die("m1")
    assert logged(job.core.handle(ev.StartFailed(member="m3", problem="no more processes"), NOW), "start_failed")[
        0
    ].say.startswith("m3 could not")
    assert job.do(job.core.on_tick(NOW + 60)) == []
    for member in ("m0", "m2"):
        commands = finish(job, member)
    assert of(End, commands)[0].code == 0


def test_first_worker_that_can_not_be_started_ends_the_job() -> None:
    end = of(End, Job(2).core.handle(ev.StartFailed(member="m1", problem="permission denied"), NOW))[0]
    assert (end.code, end.sentence) == (1, "m1 could not be started: permission denied")


def test_last_member_killed_ends_the_job() -> None:
    job = running(1)
    end = of(End, job.die("m0"))[0]
    assert (end.code, end.sentence) == (1, "m0 ended by SIGKILL, and no other member was left: the state is gone")


@pytest.mark.parametrize("message", [kind(sentence="shard 3 is gone") for kind in (LostState, Diverged, NoRoom)])
def test_what_no_replacement_could_mend_ends_the_job_with_its_sentence(message: LostState | Diverged | NoRoom) -> None:
    lost = not isinstance(message, NoRoom)  # a checkpoint gives no memory
    assert of(End, running().say("m0", message)) == [End(code=1, sentence=message.sentence, lost=lost)]


# ---- before the first commit


def test_death_before_the_first_commit_ends_the_job_without_restart() -> None:
    job = Job(2)
    job.hello("m0")
    commands = job.die("m1", exit_code=1)
    assert not of(Start, commands)
    assert of(End, commands) == [End(code=1, sentence="m1 ended with exit code 1 before the first commit")]


def test_worker_killed_before_the_first_commit_leaves_the_view_and_another_takes_its_place() -> None:
    job = Job(2)
    job.hello("m0")
    job.hello("m1")
    commands = job.die("m1")
    assert not of(End, commands)
    assert job.ids == ("m0",)
    assert job.core.cluster.view is not None and not job.core.cluster.view.begun
    job.hello("m2")
    assert job.ids == ("m0", "m2")


def test_worker_killed_before_the_first_view_is_replaced_under_its_rank() -> None:
    job = Job(2)
    job.hello("m0")
    (start,) = of(Start, job.die("m1"))
    assert (start.member, start.slot, start.rank, start.warm_up) == ("m2", 1, 1, False)
    job.hello("m2")
    assert (job.ids, job.generation) == (("m0", "m2"), 1)


def test_only_worker_killed_before_the_first_commit_begins_the_job_anew() -> None:
    job = Job(1)
    job.hello("m0")
    assert not of(End, job.die("m0"))
    job.hello("m1")
    assert (job.ids, job.generation) == (("m1",), 2)
    assert job.core.cluster.view is not None and not job.core.cluster.view.begun


def test_script_that_exits_with_an_error_before_the_first_commit_ends_the_job_though_others_live() -> None:
    job = Job(2)
    job.hello("m0")
    job.hello("m1")
    assert of(End, job.die("m1", exit_code=3))[0].sentence == "m1 ended with exit code 3 before the first commit"


def test_exception_before_the_first_commit_ends_the_job_with_its_traceback() -> None:
    job = Job(1)
    job.hello("m0")
    end = of(End, job.say("m0", Failed(step=0, micro_batch=0, signature="E", traceback="TB")))[0]
    assert (end.code, end.detail) == (1, "TB")
    assert end.sentence == "the script raised on m0 before the first commit"


def test_join_deadline_runs_from_the_first_hello_and_names_the_missing() -> None:
    job = Job(3, join_timeout_s=5.0)
    assert job.core.deadlines.next_s() is None
    job.hello("m1", now=NOW)
    job.hello("m0", now=NOW + 3)
    assert job.core.deadlines.next_s() == NOW + 5
    assert job.do(job.core.on_tick(NOW + 4.9)) == []
    (kill,) = of(Kill, job.do(job.core.on_tick(NOW + 5)))
    assert (kill.member, kill.reason) == ("m2", "m2 was not ready within 5 s of the first worker: it is ended")


def test_a_worker_that_hangs_before_the_first_view_is_replaced_and_the_job_begins() -> None:
    job = Job(2, join_timeout_s=5.0)
    job.hello("m0", now=NOW)
    assert of(Kill, job.do(job.core.on_tick(NOW + 5)))
    job.die("m1")
    job.hello("m2", now=NOW + 8)
    view = job.core.cluster.view
    assert view is not None and view.ids == ("m0", "m2")
    assert job.core.deadlines.next_s() is None


def test_who_is_late_twice_ends_the_job_and_so_does_who_may_not_be_replaced() -> None:
    job = Job(2, join_timeout_s=5.0)
    job.hello("m0", now=NOW)
    job.do(job.core.on_tick(NOW + 5))
    job.die("m1")
    end = of(End, job.do(job.core.on_tick(NOW + 10)))[0]
    assert end.sentence.startswith(
        "1 of 2 workers were ready within 5 s of the first, or within 5 s more; missing: m2."
    )
    alone = Job(3, join_timeout_s=5.0, max_restarts=1)
    alone.hello("m0", now=NOW)
    end = of(End, alone.do(alone.core.on_tick(NOW + 5)))[0]
    assert end.sentence.startswith("1 of 3 workers were ready within 5 s of the first; missing: m1, m2.")


def test_join_deadline_ends_with_the_first_view() -> None:
    assert running().core.deadlines.next_s() is None


def test_first_worker_of_another_spec_ends_the_job() -> None:
    job = Job(2)
    job.hello("m0", seed=0)
    commands = job.hello("m1", seed=1)
    assert told(commands, am.Refused) == ["m1"]
    end = of(End, commands)[0]
    assert (end.code, end.sentence) == (
        1,
        "m1 is refused: its seed is 1, the job's is 0: start every worker with the same seed",
    )


def test_plain_scripts_that_end_well_end_the_job_well() -> None:
    job = Job(2)
    assert not of(End, job.die("m0", exit_code=0))
    assert of(End, job.die("m1", exit_code=0)) == [
        End(code=0, sentence="every worker's script has ended", everywhere=False, job_is_over=False)
    ]


# ---- joiners that do not fit


def test_joiner_of_another_spec_is_refused_and_not_started_again() -> None:
    job = running()
    job.die("m1")
    commands = job.hello("m3", seed=9)
    assert told(commands, am.Refused) == ["m3"]
    assert not of(End, commands)
    assert job.core.deadlines.next_s() == NOW + 2
    assert of(Kill, job.do(job.core.on_tick(NOW + 2)))[0].member == "m3"
    assert not of(Start, job.die("m3"))
    assert job.ids == ("m0", "m2")


def test_second_hello_or_one_in_anothers_name_is_the_end_of_its_sender() -> None:
    job = running()
    assert of(Kill, job.hello("m0"))[0].member == "m0"
    job.die("m1")
    commands = job.say("m3", Hello(member="m0", address="", spec={"seed": 0}))
    assert of(Kill, commands)[0].member == "m3"


# ---- failures of the user's code


def bug(step: int = 4) -> Failed:
    return Failed(step=step, micro_batch=2, signature="ValueError", traceback="TB")


def test_first_exception_costs_one_member_and_the_second_equal_one_the_job() -> None:
    job = running()
    assert not of(End, job.say("m0", bug()))
    assert of(Start, job.die("m0", exit_code=1))
    end = of(End, job.say("m1", bug()))[0]
    assert (end.code, end.detail) == (1, "TB")
    assert "m0 and m1 raised the same exception at step 4, micro-batch 2" in end.sentence


def test_of_an_exception_that_is_one_sentence_the_launcher_says_it_at_once() -> None:
    job = running()
    wrong = Failed(step=4, micro_batch=2, signature="ConfigError: odd", traceback="train.py:3: odd\n")
    (told,) = logged(job.say("m0", wrong), "failed")
    assert told.say == "the script raised on m0 at step 4, micro-batch 2; another member tries\ntrain.py:3: odd"
    (told,) = logged(running().say("m0", Failed(step=4, micro_batch=2, signature="E", traceback="a\nb\n")), "failed")
    assert told.say == "the script raised on m0 at step 4, micro-batch 2; another member tries"


def test_member_that_raised_and_does_not_end_is_ended() -> None:
    job = running()
    job.say("m0", bug())
    assert of(Kill, job.do(job.core.on_tick(NOW + 2)))[0].member == "m0"


def test_only_member_raising_ends_the_job_with_its_traceback() -> None:
    job = running(1)
    job.say("m0", bug())
    end = of(End, job.die("m0", exit_code=1))[0]
    assert end.detail == "TB"
    assert end.sentence.startswith("the script raised on m0 at step 4, micro-batch 2, and no other member was left")


# ---- suspicion


def test_member_left_out_before_the_first_commit_is_replaced_and_ends_no_job() -> None:
    """It ends with an error as soon as it is told: that is no fault of the script."""
    job = Job(3)
    for n in range(3):
        job.hello(f"m{n}")
    job.say("m0", Suspect(member="m1", reason="no link"))
    job.say("m2", Suspect(member="m1", reason="no link"))
    job.do(job.core.on_tick(NOW + 1))
    assert job.ids == ("m0", "m2")
    commands = job.die("m1", exit_code=1)
    assert not of(End, commands)
    assert [start.member for start in of(Start, commands)] == ["m3"]


def test_suspected_member_that_lives_on_is_ended_after_a_while() -> None:
    job = running()
    job.say("m0", Suspect(member="m1", reason="link reset"))
    job.say("m2", Suspect(member="m1", reason="link reset"))
    job.say("m1", Suspect(member="m0", reason="link reset"))
    assert job.do(job.core.on_tick(NOW + 0.9)) == []
    commands = job.do(job.core.on_tick(NOW + 1))
    assert logged(commands, "end_suspect")[0].say == "m1 lives, but m0, m2 cannot reach it: it is ended"
    assert (job.ids, told(commands, am.NewView)) == (("m0", "m2"), ["m0", "m1", "m2"])
    assert of(Kill, job.do(job.core.on_tick(NOW + 3)))[0].member == "m1", "it had time to leave by itself"


@pytest.mark.parametrize(
    ("exit_code", "words"), [(-15, "by SIGTERM"), (-11, "by SIGSEGV"), (-50, "by signal 50"), (3, "with exit code 3")]
)
def test_a_worker_that_ends_is_lost_and_replaced_whoever_has_ended_it(exit_code: int, words: str) -> None:
    """SIGTERM to a worker alone is no notice for its node: nobody hands over, nobody leaves, and the restart counts."""
    job = running(max_restarts=3)
    job.commit(0, "m0", "m1", "m2")
    commands = job.die("m1", exit_code=exit_code)
    assert f"m1 ended {words}; another is started in its place (restart 1 of 3)" in [c.say for c in of(Log, commands)]
    assert of(End, commands) == []
    assert [command.member for command in of(Start, commands)] == ["m3"]


@pytest.mark.parametrize(
    ("max_restarts", "words"),
    [
        (1, "m1 ended by SIGKILL; another is started in its place (restart 1 of 1)"),
        (0, "m1 ended by SIGKILL; not started again: this job replaces no workers (--max-restarts 0)"),
    ],
)
def test_what_becomes_of_a_suspect_is_said_when_it_is_known(max_restarts: int, words: str) -> None:
    job = running(max_restarts=max_restarts)
    job.say("m0", Suspect(member="m1", reason="link reset"))
    job.do(job.core.on_tick(NOW + 1))
    assert words in [log.say for log in of(Log, job.die("m1", exit_code=-9))]


def test_suspicion_ends_with_the_proof_of_death() -> None:
    job = running()
    job.say("m0", Suspect(member="m1", reason="link reset"))
    job.die("m1")
    assert job.do(job.core.on_tick(NOW + 1)) == []


def test_suspicion_outlives_a_change_of_the_view() -> None:
    job = running()
    job.say("m0", Suspect(member="m2", reason="link reset"))
    job.die("m1")
    job.do(job.core.on_tick(NOW + 1))
    assert job.ids == ("m0",)


def test_nobody_outside_the_view_can_be_suspected() -> None:
    job = running()
    job.die("m1")
    for member in ("m1", "m3", "m9"):
        assert job.say("m0", Suspect(member=member, reason="silence")) == []


# ---- the end


def finish(job: Job, member: str) -> list[Command]:
    return job.say(member, Finished(step=9, digest="d")) + job.die(member, exit_code=0)


def test_job_is_over_when_every_member_has_finished_and_left() -> None:
    job = running()
    assert not of(Propose, finish(job, "m0"))
    finish(job, "m1")
    assert of(End, finish(job, "m2")) == [FINISHED]
    assert job.generation == 1


def test_late_joiner_is_ended_and_does_not_spoil_the_exit_code() -> None:
    job = running()
    job.die("m1")
    job.say("m0", Finished(step=9, digest="d"))
    assert [k.member for k in of(Kill, finish(job, "m2") + finish(job, "m0"))] == ["m3"]
    assert of(End, job.die("m3")) == [FINISHED]


def test_a_newcomer_that_dies_behind_the_last_finished_member_leaves_nobody_waiting() -> None:
    """Its view came when the others had passed the end. A second newcomer waited forever for a view."""
    job = running()
    job.die("m1")  # m3 is started
    job.die("m2")  # and m4
    job.hello("m3")
    assert job.ids == ("m0", "m3")
    job.say("m0", Finished(step=9, digest="d"))
    assert of(End, job.die("m0", exit_code=0)) == []
    assert [k.member for k in of(Kill, job.die("m3", exit_code=1))] == ["m4"]
    assert of(End, job.die("m4"))[0].code == 0


def test_members_that_end_with_different_parameters_fail_the_job() -> None:
    """Each digest was shown by `status`, and nobody compared them: exit code 0, with two results."""
    job = running()
    finish(job, "m0")
    [end] = of(End, finish(job, "m2") + job.say("m1", Finished(step=9, digest="other")))
    assert end.code == 1
    assert "m0 has the digest d, m1 has other" in end.sentence


def test_first_to_finish_frees_the_others_from_waiting() -> None:
    job = running()
    assert told(job.say("m0", Finished(step=9, digest="d")), am.EndReached) == ["m0", "m1", "m2"]
    assert told(job.say("m1", Finished(step=9, digest="d")), am.EndReached) == []


def test_death_once_one_has_finished_changes_neither_view_nor_outcome() -> None:
    job = running()
    finish(job, "m0")
    commands = job.die("m1")
    assert not of(Start, commands)
    assert not of(Propose, commands)
    assert of(End, finish(job, "m2"))[0].code == 0


def test_last_member_dying_after_another_has_finished_does_not_spoil_the_end() -> None:
    job = running(2)
    finish(job, "m0")
    assert of(End, job.die("m1"))[0].code == 0


def test_finished_member_that_closes_its_links_is_not_suspected() -> None:
    job = running()
    job.say("m0", Finished(step=9, digest="d"))
    assert job.say("m1", Suspect(member="m0", reason="link closed")) == []


def test_joiner_is_not_let_in_when_others_have_finished() -> None:
    job = running()
    job.die("m1")
    job.say("m0", Finished(step=9, digest="d"))
    assert not of(Propose, job.hello("m3"))


def test_crash_after_finishing_is_reported_by_the_exit_code() -> None:
    job = running(1)
    job.say("m0", Finished(step=9, digest="d"))
    end = of(End, job.die("m0", exit_code=-11))[0]
    assert (end.code, end.sentence) == (1, "m0 ended by SIGSEGV after it had finished its work")


def test_finished_member_that_does_not_exit_is_ended_without_harm() -> None:
    job = running(1, exit_timeout_s=5.0)
    job.say("m0", Finished(step=9, digest="d"))
    assert of(Kill, job.do(job.core.on_tick(NOW + 5)))[0].member == "m0"
    assert of(End, job.die("m0"))[0].code == 0


def test_member_whose_script_ends_early_is_not_replaced() -> None:
    job = running()
    commands = job.die("m0", exit_code=0)
    assert not of(Start, commands)
    assert job.ids == ("m1", "m2")


def test_member_whose_script_ends_before_the_first_commit_leaves_the_view() -> None:
    job = Job(2)
    job.hello("m0")
    job.hello("m1")
    job.die("m0", exit_code=0)
    assert job.ids == ("m1",)


def test_all_scripts_ending_early_is_a_good_end() -> None:
    job = running(2)
    job.die("m0", exit_code=0)
    assert of(End, job.die("m1", exit_code=0))[0].code == 0


def test_late_joiner_does_not_spoil_the_end_of_scripts_that_end_early() -> None:
    job = running(2)
    job.die("m1")
    assert of(Kill, job.die("m0", exit_code=0))[0].member == "m2"
    assert of(End, job.die("m2"))[0].code == 0


def test_after_the_end_nothing_is_decided_any_more() -> None:
    job = running()
    assert of(End, job.happen(ev.StopAsked(code=143, sentence="stopped by SIGTERM")))[0].code == 143
    assert job.happen(ev.StopAsked(code=130, sentence="stopped by SIGINT")) == []
    assert [c.event for c in of(Log, job.die("m0"))] == ["death", "exit"]
    assert job.say("m1", LostState(sentence="?")) == []
    assert logged(job.say("m1", Note(fields={"x": 1})), "note")
    assert job.core.deadlines.next_s() is None


def test_channel_that_breaks_leaves_the_worker_a_little_time_to_end() -> None:
    job = running()
    assert job.happen(ev.ChannelClosed(member="m0")) == []
    assert of(Kill, job.do(job.core.on_tick(NOW + 2)))[0].member == "m0"
    job.die("m1")
    job.core.handle(ev.ChannelClosed(member="m1"), NOW)
    assert job.do(job.core.on_tick(NOW + 2)) == []


# ---- faults


def test_fault_needs_an_armed_run() -> None:
    sentence, taken, commands = running().core.inject(grammar.parse("kill --target member:m1"))
    assert (taken, commands) == (False, [])
    assert "not armed" in sentence


def test_fault_at_once_kills_and_one_at_a_step_is_handed_over() -> None:
    job = running(armed=True)
    assert of(Kill, job.core.inject(grammar.parse("kill --target member:m1"))[2])[0].member == "m1"
    tell = of(Tell, job.core.inject(grammar.parse("kill --target member:m1 --at step=4,phase=commit"))[2])[0]
    assert tell.message == am.ArmFault(kind="kill", step=4, phase="commit")


def test_fault_at_a_step_that_has_passed_is_refused() -> None:
    job = running(armed=True)
    job.say("m1", Progress(step=4, loss=1.0, samples=4, holders=None))
    sentence, taken, commands = job.core.inject(grammar.parse("kill --target member:m1 --at step=4"))
    assert (sentence, taken, commands) == ("step 4 has passed: step 4 is committed", False, [])
    assert job.core.inject(grammar.parse("kill --target member:m1 --at step=5"))[1]


def test_fault_for_a_worker_that_is_not_ready_waits_for_its_hello() -> None:
    job = running(armed=True)
    job.die("m1")
    sentence, taken, commands = job.core.inject(grammar.parse("kill --target member:m3 --at step=4"))
    assert (taken, commands) == (True, [])
    assert "waits for m3" in sentence
    assert told(job.hello("m3"), am.ArmFault) == ["m3"]


def test_fault_for_nobody_is_refused_with_the_list_of_the_living() -> None:
    job = running(armed=True)
    job.die("m1")
    for member in ("m1", "m7"):
        sentence, taken, _ = job.core.inject(grammar.parse(f"kill --target member:{member}"))
        assert (taken, sentence) == (False, f"there is no living member {member}: there are m0, m2, m3")


def test_random_target_is_chosen_among_the_members() -> None:
    job = running(armed=True)
    assert of(Kill, job.core.inject(grammar.parse("kill --target member:random"))[2])[0].member == "m2"
    assert not Job(2, armed=True).core.inject(grammar.parse("kill --target member:random"))[1]


def test_faults_of_the_file_are_handed_over_with_hello_and_first_view() -> None:
    faults = [
        grammar.parse("kill --target member:m1 --at step=3"),
        grammar.parse("kill --target member:random --at step=5"),
        grammar.parse("kill --target member:m3 --at step=7"),
    ]
    job = Job(2, faults, armed=True)
    assert told(job.hello("m1"), am.ArmFault) == ["m1"]
    assert told(job.hello("m0"), am.ArmFault) == ["m1"]
    job.commit(0)
    job.die("m1")
    job.hello("m2")
    job.die("m2")
    assert told(job.hello("m3"), am.ArmFault) == ["m3"]


def test_fault_at_a_time_strikes_whoever_lives_then() -> None:
    job = running(armed=True, began_s=NOW)
    sentence, taken, commands = job.core.inject(grammar.parse("kill --target member:m1 --at t=5"))
    assert (sentence, taken, commands) == ("kill --target member:m1 --at t=5 is due", True, [])
    assert job.do(job.core.on_tick(NOW + 4.9)) == []
    assert [c.member for c in of(Kill, job.do(job.core.on_tick(NOW + 5.0)))] == ["m1"]
    job.core.inject(grammar.parse("kill --target member:m7 --at t=6"))
    assert [log.event for log in of(Log, job.do(job.core.on_tick(NOW + 6.0)))] == ["fault_refused"]


def test_several_targets_are_struck_together_or_none_of_them() -> None:
    job = running(armed=True)
    _, taken, commands = job.core.inject(grammar.parse("kill --target member:m0,member:random"))
    assert taken
    assert [c.member for c in of(Kill, commands)] == ["m0", "m2"]
    sentence, taken, commands = job.core.inject(grammar.parse("kill --target member:m1,member:m9"))
    assert (taken, commands) == (False, [])
    assert "no living member m9" in sentence


def test_two_random_targets_are_different_members() -> None:
    job = running(armed=True)
    random = grammar.parse("kill --target member:random,member:random")
    assert sorted(c.member for c in of(Kill, job.core.inject(random)[2])) == ["m1", "m2"]


def test_agents_faults_are_carried_out_at_once_or_where_a_worker_says_so() -> None:
    job = running(armed=True)
    strike = of(Strike, job.core.inject(grammar.parse("stop --target member:m1 --for 2"))[2])[0]
    assert (strike.kind, strike.member, strike.for_s) == ("stop", "m1", 2.0)
    tell = of(Tell, job.core.inject(grammar.parse("preempt --target member:m1 --at phase=commit --grace 3"))[2])[0]
    assert isinstance(tell.message, am.ArmFault)
    assert tell.message.number is not None
    struck = am.Struck(number=tell.message.number)
    strike = of(Strike, job.say("m1", struck))[0]
    assert (strike.kind, strike.member, strike.options) == ("preempt", "m1", {"grace": 3.0})
    assert of(Strike, job.say("m1", struck)) == []  # once


def test_workers_faults_are_told_to_the_worker_even_at_once() -> None:
    job = running(armed=True)
    tell = of(Tell, job.core.inject(grammar.parse("slow --target member:m1 --factor 4 --for 9"))[2])[0]
    wanted = {"factor": 4.0, "how": "busy"}
    assert tell.message == am.ArmFault(kind="slow", step=None, phase=None, for_s=9.0, options=wanted)


def test_a_wrong_replacement_takes_the_place_of_the_one_that_is_killed() -> None:
    job = running(armed=True)
    commands = job.core.inject(grammar.parse("wrong-replacement --target member:m1 --what torch"))[2]
    assert [c.member for c in of(Kill, commands)] == ["m1"]
    assert [start.wrong for start in of(Start, job.die("m0"))] == [""]
    assert [start.wrong for start in of(Start, job.die("m1"))] == ["torch"]


def test_faults_of_the_network_go_to_the_launcher_at_once_or_from_their_place() -> None:
    job = running(armed=True)
    line = "partition --target node:node0 --for 3"
    tell = of(Tell, job.core.inject(grammar.parse(f"{line} --at step=4"))[2])[0]
    assert isinstance(tell.message, am.ArmFault)
    assert tell.message.number is not None
    assert of(AskLauncher, job.say(tell.member, am.Struck(number=tell.message.number)))[0].line == line


def test_faults_of_the_file_with_a_time_are_due_from_the_start() -> None:
    faults = [grammar.parse("kill --target member:random --at t=3"), grammar.parse("etcd-kill --at t=3")]
    job = running(faults=faults, armed=True, began_s=NOW)
    commands = job.do(job.core.on_tick(NOW + 3))
    assert [c.member for c in of(Kill, commands)] == ["m2"]
    assert [c.line for c in of(AskLauncher, commands)] == ["etcd-kill --target etcd"]


def test_fault_with_a_time_and_a_phase_waits_for_both() -> None:
    job = running(armed=True, began_s=NOW)
    job.core.inject(grammar.parse("segfault --target member:m1 --at t=5,phase=commit"))
    tell = of(Tell, job.do(job.core.on_tick(NOW + 5.0)))[0]
    assert tell.message == am.ArmFault(kind="segfault", step=None, phase="commit")


def test_with_care_a_fault_strikes_only_where_the_state_survives() -> None:
    """Each shard of the ring has two holders: of three members, one may be lost at a time."""
    job = running(armed=True)
    kill = grammar.parse
    assert not job.core.inject(kill("kill --target member:m0,member:m1"), ())[1]
    assert job.core.inject(kill("stop --target member:m0 --for 2"), ())[1]
    sentence, taken, commands = job.core.inject(kill("kill --target member:m1"), ("m0",))
    assert (taken, commands) == (False, [])
    assert sentence == "kill --target member:m1 does not strike: all holders of shard 0 would be struck"
    assert job.core.inject(kill("slow --target member:m1"), ("m0",))[1]  # it costs nobody
    assert job.core.inject(kill("kill --target member:m1"), ())[1]  # m0 goes on by then
    assert job.core.inject(kill("kill --target member:m0"), None)[1]  # nobody asked for care


def test_with_care_nothing_strikes_before_the_holders_are_known() -> None:
    job = Job(2, armed=True)
    job.hello("m0")
    job.hello("m1")
    assert "not known yet" in job.core.inject(grammar.parse("kill --target member:m0"), ())[0]


# ---- what status shows


def test_status_shows_members_in_rank_order_then_the_warming_up() -> None:
    job = running()
    job.die("m0")
    state = describe(job.core, "job", NOW)
    rows = [(m["rank"], m["id"], m["state"]) for m in state["members"]]
    assert rows == [(0, "m1", "member"), (1, "m2", "member"), (None, "m3", "starting")]
    assert (state["state"], state["generation"], state["step"], state["restarts_left"]) == ("running", 2, 0, 9)
    assert state["reasons"][-1] == "generation 2: m0 lost"


def test_status_shows_why_a_member_does_not_pass_its_step_until_it_does() -> None:
    job = running()

    def shown() -> list[str]:
        return [member["waits_for"] for member in describe(job.core, "job", NOW)["members"]]

    job.say("m1", WaitReason(step=1, reason="no vote of m2 yet"))
    assert shown() == ["", "no vote of m2 yet", ""]
    job.commit(1)
    assert shown() == ["", "", ""]


def test_steps_committed_again_are_counted() -> None:
    job = running()
    job.commit(1)
    job.commit(2)
    assert job.core.cluster.workers.steps_lost == 0
    job.commit(1, "m0")
    assert job.core.cluster.workers.steps_lost == 2


def test_what_pipelines_compute_again_is_counted_once_per_view() -> None:
    job = running()
    told = [job.say(member, Redone(generation=2, step=4, pairs=6)) for member in ("m0", "m1")]
    assert [len(of(Log, each)) for each in told] == [1, 0]
    assert of(Log, told[0])[0].fields == {"step": 4, "pairs": 6}
    job.say("m0", Redone(generation=3, step=4, pairs=2))
    assert describe(job.core, "job", NOW)["redone"] == 8


def test_worker_stage_follows_its_life() -> None:
    job = Job(1)
    stages = [job.core.cluster.workers.by_id["m0"].stage]
    job.hello("m0")
    stages.append(job.core.cluster.workers.by_id["m0"].stage)
    job.commit(0)
    finish(job, "m0")
    stages.append(job.core.cluster.workers.by_id["m0"].stage)
    assert stages == [Stage.STARTING, Stage.MEMBER, Stage.LEFT]


def test_worker_that_talks_nonsense_is_ended() -> None:
    kill = of(Kill, running().core.handle(ev.WorkerMisspoke(member="m0", problem="no JSON"), NOW))[0]
    assert kill.reason == "m0 sent what no worker sends: no JSON"


# ---- a newcomer that does not come


def ticked(job: Job, after_s: float) -> list[Command]:
    return job.do(job.core.on_tick(NOW + after_s))


def test_a_replacement_that_never_says_hello_is_ended_and_replaced() -> None:
    job = running()
    job.die("m0")
    assert not of(Kill, ticked(job, 119.0))
    [kill] = of(Kill, ticked(job, 121.0))
    assert kill.member == "m3"
    assert "m3 has not said hello within 121 s of its start" in kill.reason
    assert [start.member for start in of(Start, job.die("m3"))] == ["m4"]


def test_a_replacement_that_says_hello_in_time_is_not_ended() -> None:
    job = running()
    job.die("m0")
    job.hello("m3", NOW + 119.0)
    assert not of(Kill, ticked(job, 1000.0))


def test_a_script_that_takes_long_before_its_hello_gets_three_times_as_long_again() -> None:
    job = Job(2)
    for member in ("m0", "m1"):
        job.hello(member, NOW + 100.0)
    job.commit(0)
    job.die("m1")
    assert not of(Kill, ticked(job, 299.0))
    assert [kill.member for kill in of(Kill, ticked(job, 301.0))] == ["m2"]


def test_a_plain_script_may_run_as_long_as_it_likes_without_a_hello() -> None:
    job = Job(1)
    job.die("m0")
    assert not of(Kill, ticked(job, 10_000.0))
