"""When a member checks a neighbour's micro-batch, and what its vote waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain import protocol as p
from elastrain.job.values import Check, Vote
from elastrain.member.member_machine import MemberMachine
from elastrain.protocol.messages import Publish
from tests.unit.member.test_lifecycle import SHAPE, TOLD, Pair, first_report, sent, view


def _failures(pair: Pair, name: str) -> list[tuple[str, str]]:
    return [(c.kind, c.reason) for c in pair.done[name] if isinstance(c, p.Fail)]


def _recomputes(pair: Pair, name: str) -> list[p.Recompute]:
    return [c for c in pair.done[name] if isinstance(c, p.Recompute)]


def _records(pair: Pair) -> list[list[p.Passed]]:
    return [[c for c in pair.done[name] if isinstance(c, p.Passed)] for name in ("a", "b")]


def test_members_that_differ_end_the_job_with_one_sentence_on_each() -> None:
    pair = Pair()
    pair.digests["b"] = 8
    pair.start()
    pair.one_step()
    assert _failures(pair, "a") == _failures(pair, "b") != []
    ((kind, reason),) = _failures(pair, "a")
    assert kind == "DivergedError"
    assert "micro-batch 0 of step 0 came out differently on a and b" in reason
    assert _records(pair) == [[], []]


def test_where_kernels_may_differ_the_step_commits_with_a_warning_in_the_one_record() -> None:
    pair = Pair(replace(SHAPE, deterministic=False))
    pair.digests["b"] = 8
    pair.start()
    pair.one_step()
    ours, theirs = _records(pair)
    assert ours == theirs
    assert "came out differently on a and b" in ours[0].record.findings.warning


def test_a_member_without_runs_computes_it_twice_so_that_what_it_carries_along_has_moved_on() -> None:
    pair = Pair()
    pair.start()
    pair.one_step()
    assert _recomputes(pair, "b") == [p.Recompute(step=0, run=0)] * 2
    assert _recomputes(pair, "a") == [], "nobody else has a run"
    assert _records(pair)[0][0].record.findings.warning == ""


@pytest.mark.parametrize(("every", "steps"), [(0, [0]), (1, [0, 1, 2]), (2, [0, 2])])
def test_checks_are_made_in_the_first_step_and_on_request(every: int, steps: list[int]) -> None:
    pair = Pair(replace(SHAPE, backups=0, cross_check_every=every))
    pair.start()
    for step in range(3):
        pair.tell("a", p.BlockDone(step=step, run=0, block=0, contribution=TOLD, touched=1))
        pair.tell("a", p.Ready())
        for name in ("a", "b"):
            pair.tell(name, p.Began(step=step + 1, settings="lr", state="s"))
            pair.tell(name, p.Ready())
    assert [record.record.step for record in _records(pair)[1]] == [0, 1, 2]
    assert sorted({c.step for c in _recomputes(pair, "b")} - {3}) == steps


def _waiting() -> MemberMachine:
    """`b`, which has done its run of two and is asked to compute that of `a`."""
    b = MemberMachine(me="b", shape=replace(SHAPE, runs=2, backups=0))
    b.handle(p.Viewed(view=view(1, "a", "b")))
    b.handle(p.Arrived(source="a", generation=1, message=first_report("a", b.shape)))
    b.handle(p.Arrived(source="a", generation=1, message=Publish(step=-1, record=None, shards=(0,))))
    b.handle(p.Began(step=0, settings="lr", state="s"))
    assert p.Compute(step=0, run=1, probed=True) in b.handle(p.Ready())
    b.handle(p.BlockDone(step=0, run=1, block=0, contribution=TOLD, touched=1))
    b.machine.custody.comparison._is_equal = True  # with what it has computed is shown elsewhere
    return b


CHECK = Check(micro_batch=1, loss=1.0, weight=1.0, digests=(3,))


def test_a_vote_waits_for_its_own_probe_and_for_the_neighbours() -> None:
    b = _waiting()
    assert not sent(b.handle(p.Checked(step=0, run=1, check=CHECK)), Vote)
    assert p.Recompute(step=0, run=0) in b.handle(p.Ready())
    theirs = replace(CHECK, micro_batch=0)
    (vote,) = sent(b.handle(p.Checked(step=0, run=0, check=theirs)), Vote)
    assert isinstance(vote.message, Vote)
    assert vote.message.checks == (theirs, CHECK)


def test_a_check_that_was_given_up_is_not_waited_for_and_nothing_is_compared() -> None:
    b = _waiting()
    b.handle(p.Checked(step=0, run=1, check=CHECK))
    b.handle(p.Ready())
    (vote,) = sent(b.handle(p.Checked(step=0, run=0, check=None)), Vote)
    assert isinstance(vote.message, Vote)
    assert vote.message.checks == (CHECK,)


def test_a_neighbour_that_is_gone_is_not_checked_any_more() -> None:
    b = _waiting()
    b.handle(p.Checked(step=0, run=1, check=CHECK))
    assert not b.machine.step.check.is_done()
    b.handle(p.Viewed(view=view(2, "b", "c")))
    assert b.machine.step.check.is_done(), "c came later and has no probe of this step"


def test_what_came_of_a_step_that_is_over_is_ignored() -> None:
    b = _waiting()
    b.handle(p.Checked(step=7, run=0, check=CHECK))
    assert b.machine.step.check.results() == ()
