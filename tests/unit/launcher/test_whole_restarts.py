"""Scripts without `job.steps`: all workers are started again as under torchrun, decided by the cores of all agents."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.core.failures import may_start_all_again
from elastrain.launcher.shared.job_values import End, Life, NodeRecord, Roster, Start, TellNodes
from elastrain.launcher.shared.notices import Over
from elastrain.launcher.start.restarts import LifeEnd, agree, next_life
from elastrain.launcher.start.run_options import JobSize, RunOptions, Script
from elastrain.launcher.store.job_keys import JobKeys
from elastrain.launcher.store.life_keys import read_life
from elastrain.launcher.store.port import MemoryStore
from elastrain.launcher.store.sealed import SealedStore
from elastrain.protocol.agent_messages import Note
from tests.support.agents import job_config
from tests.unit.launcher.test_core import Job, of

AGAIN = End(code=1, sentence="m1 ended by SIGKILL", lost=True, again=True)


def ends(job: Job) -> list[End]:
    return of(End, job.done)


def test_a_killed_worker_ends_this_life_and_the_next_has_as_many_workers() -> None:
    job = Job(2, max_restarts=3)
    job.die("m1")
    end = ends(job)[0]
    assert (end.code, end.lost, end.again) == (1, True, True)
    assert end.sentence == "m1 ended by SIGKILL: all workers are started again (restart 1 of 3)"
    following = next_life(Life(), end, newest_step=None, first_member=2).life
    assert following == Life(number=2, restarts=1, first_member=2)


def test_an_error_restarts_all_only_if_the_user_has_asked_for_restarts() -> None:
    asked, unasked = Job(2, max_restarts=1), Job(2)
    for job in (asked, unasked):
        job.die("m0", exit_code=1)
    assert [end.again for job in (asked, unasked) for end in ends(job)] == [True, False]
    assert ends(unasked)[0].sentence == "m0 ended with exit code 1 before the first commit"


def test_when_the_restarts_are_used_up_the_job_ends_on_all_nodes() -> None:
    job = Job(2, max_restarts=1, life=Life(number=2, restarts=1))
    job.die("m1")
    end = ends(job)[0]
    assert (end.code, end.again, end.everywhere) == (1, False, True)
    assert end.sentence == "m1 ended by SIGKILL: all 1 restarts are used up (--max-restarts)"


def test_a_worker_that_ends_well_leaves_the_others_alone() -> None:
    job = Job(2, max_restarts=3)
    job.die("m0", exit_code=0)
    assert not ends(job)


@pytest.mark.parametrize("told", ["spoke", "channel"])
def test_workers_that_have_opened_their_channel_handle_losses_themselves(told: str) -> None:
    job = Job(2, max_restarts=3)
    if told == "spoke":
        job.say("m0", Note(fields={}))
    else:
        job.happen(ev.ChannelClosed(member="m1"))
    job.die("m1")
    assert not ends(job) and job.core.cluster.workers.by_id["m2"].replaces == "m1"


def test_a_job_with_a_view_replaces_the_worker_alone() -> None:
    job = Job(2, max_restarts=3)
    job.hello("m0")
    job.hello("m1")
    job.commit(0)
    job.die("m1")
    assert not ends(job) and "m2" in job.core.cluster.workers.by_id


def test_the_other_nodes_are_told_and_none_decides_twice() -> None:
    one, other = (
        Job(1, node=name, nodes_max=2, incarnation=number, max_restarts=2) for number, name in ((1, "a"), (2, "b"))
    )
    records = [job.core.cluster.peers.record for job in (one, other)]
    for job, record in ((one, records[1]), (other, records[0])):
        job.happen(ev.NodeCame(record=record))
    told = [command.message for command in one.die("m0") if isinstance(command, TellNodes)]
    over = next(message for message in told if isinstance(message, Over))
    assert over.again and over.lost
    other.happen(ev.NoticeCame(node="a", notice=over))
    assert [end.again for end in ends(other)] == [True]
    assert not [
        c for c in other.die("m1") if isinstance(c, End) or (isinstance(c, TellNodes) and isinstance(c.message, Over))
    ]
    assert not [c for c in one.happen(ev.EndStands(over=over)) if isinstance(c, End)]


def test_a_node_that_was_told_to_leave_does_not_begin_again() -> None:
    job = Job(1, max_restarts=3)
    job.happen(ev.StopAsked(code=143, sentence="stopped by SIGTERM"))
    job.die("m0")
    assert [end.again for end in ends(job)] == [False]


@given(exit_code=st.integers(-64, 255), used=st.integers(0, 12), limit=st.none() | st.integers(0, 11))
def test_there_are_never_more_restarts_than_allowed(exit_code: int, used: int, limit: int | None) -> None:
    config = job_config(workers=1, max_restarts=limit, life=Life(number=used + 1, restarts=used))
    ruling = may_start_all_again(exit_code, config)
    allowed = 10 if limit is None else limit
    if exit_code == 0 or (exit_code > 0 and limit is None):
        assert ruling is None
    else:
        assert ruling is not None and ruling.yes == (used < allowed)


# ---- in the store, and the options of what follows


def test_all_nodes_count_the_same_restarts() -> None:
    store = SealedStore(MemoryStore(), b"s" * 32)
    keys = JobKeys(store, "j", 60.0)
    keys.put_roster(Roster(nodes=(NodeRecord(name="a", incarnation=1, workers=2),)))
    ended = LifeEnd(life=Life(), end=AGAIN, first_member=2)
    first, second = (agree(store, "j", 60.0, ended, None) for _ in range(2))
    assert first.life == second.life == read_life(store, "j")[1] == Life(number=2, restarts=1, first_member=2)
    third = agree(store, "j", 60.0, replace(ended, life=Life(number=2, restarts=1)), None).life
    assert third is not None and (third.number, third.restarts) == (3, 2)


def test_a_restart_keeps_what_the_command_said_and_waits_for_as_many_nodes() -> None:
    size = JobSize(nodes_min=2, nodes_max=3)
    options = RunOptions(job="j", script=Script(command="x"), target="x", size=size)
    again, later = Life(number=3, restarts=2), Life(number=3, restarts=1)
    assert (again.is_first, later.is_first) == (True, False)
    assert options.config(node="a", life=again).least.nodes == 2
    assert options.config(node="a", life=later).least.nodes == 1


def test_the_workers_environment_counts_restarts_as_torchrun_does() -> None:
    job = Job(1, max_restarts=3, life=Life(number=3, restarts=2))
    assert [start.restarts for start in of(Start, job.done)] == [2]
