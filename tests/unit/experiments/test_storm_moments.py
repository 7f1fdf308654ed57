"""Which moment it is in a running job, and what may be taken away then: from journals written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.journals import Run, run_of
from experiments.storm import cases
from experiments.storm.cases import Case, draw
from experiments.storm.moments import at_moment, micro_batches_of
from experiments.storm.permission import Told, may_lose_since, still_told

ALL = ("m0", "m1", "m2")


def case(micro_batches: int = 6, run_length: int = 1) -> Case:
    drawn = draw(0)
    return replace(
        drawn, training=replace(drawn.training, micro_batches=micro_batches, run_length=run_length, backups=1)
    )


def view(generation: int, *members: str) -> dict[str, object]:
    return {"event": "view", "t": 0.0, "generation": generation, "members": list(members), "reason": ""}


def start(member: str, at_s: float = 0.0) -> dict[str, object]:
    return {"event": "worker_start", "t": at_s, "member": member, "slot": int(member[1:]), "pid": 1}


def passed(step: int, generation: int, at_s: float) -> dict[str, object]:
    told = {"loss": 0.0, "samples": 1, "fingerprint": 0}
    return {"event": "passed", "t": at_s, "step": step, "generation": generation, **told}


def computed(step: int, *indices: int) -> list[dict[str, object]]:
    return [
        {"event": "micro_batch", "t": 10.0 + i, "step": step, "micro_batch": i, "run": i, "started_s": 0.0}
        for i in indices
    ]


def run(views: list[dict[str, object]], **journals: list[dict[str, object]]) -> Run:
    return run_of([*(start(m) for m in journals), *views], journals)


def test_idle_is_who_has_computed_its_share_while_another_has_not() -> None:
    found = run(
        [view(1, *ALL)],
        m0=[passed(3, 1, 9.0), *computed(4, 0, 1)],
        m1=[passed(3, 1, 9.0), *computed(4, 2)],
        m2=[passed(3, 1, 9.0), *computed(3, 4, 5)],
    )
    assert at_moment("idle", found, ALL, case()) == {"m0": 11.0}


def test_nobody_is_idle_when_all_have_computed_their_shares() -> None:
    journals = {m: [passed(3, 1, 9.0), *computed(4, 2 * i, 2 * i + 1)] for i, m in enumerate(ALL)}
    assert at_moment("idle", run([view(1, *ALL)], **journals), ALL, case()) == {}


def test_nobody_is_idle_in_a_step_that_began_in_another_view() -> None:
    journals = {"m0": [passed(3, 1, 9.0), *computed(4, 0, 1, 2)], "m1": [passed(3, 1, 9.0)]}
    found = run([view(1, *ALL), view(2, "m0", "m1")], **journals)
    assert at_moment("idle", found, ("m0", "m1"), case()) == {}


def test_shares_are_those_of_the_job() -> None:
    assert micro_batches_of(ALL, case(7, 2)) == {"m0": {0, 1, 2, 3}, "m1": {4, 5}, "m2": {6}}


def test_right_after_a_commit_is_until_the_last_loop_goes_on() -> None:
    on = {"event": "advance", "t": 9.1, "step": 3}
    journals = {"m0": [passed(3, 1, 9.0), on], "m1": [passed(2, 1, 8.0)], "m2": [passed(3, 1, 9.05), on]}
    found = run([view(1, *ALL)], **journals)
    assert at_moment("committed", found, ALL, case()) == dict.fromkeys(ALL, 9.0)
    assert at_moment("committed", found, ("m0", "m2"), case()) == {}


def test_a_recovery_is_from_the_first_word_of_the_loss_to_the_next_commit() -> None:
    views, two = [view(1, *ALL), view(2, "m0", "m1")], ("m0", "m1")
    edit = {"event": "edit", "t": 12.0, "generation": 2}
    before = [passed(3, 1, 9.0)]
    assert at_moment("recovering", run(views, m0=before, m1=before), two, case()) == {}
    during = run(views, m0=[*before, edit], m1=before)
    assert at_moment("recovering", during, two, case()) == dict.fromkeys(two, 12.0)
    after = run(views, m0=[*before, edit, passed(4, 2, 13.0)], m1=[*before, edit])
    assert at_moment("recovering", after, two, case()) == {}


def test_a_view_that_only_adds_is_no_recovery() -> None:
    edit = {"event": "edit", "t": 12.0, "generation": 2}
    found = run([view(1, "m0"), view(2, "m0", "m1")], m0=[passed(3, 1, 9.0), edit], m1=[])
    assert at_moment("recovering", found, ("m0", "m1"), case()) == {}


def test_somebody_starts_until_a_view_has_it() -> None:
    assert at_moment("starting", run([view(1, "m0")], m0=[], m1=[]), ("m0",), case()) == {"m0": 0.0}
    assert at_moment("starting", run([view(1, "m0", "m1")], m0=[], m1=[]), ("m0",), case()) == {}


def test_somebody_has_just_joined_for_a_second() -> None:
    views = [view(1, "m0"), view(2, "m0", "m1")]
    resumed = {"event": "resumed", "t": 20.0, "generation": 2}
    both = ("m0", "m1")
    assert at_moment("joined", run(views, m0=[], m1=[]), both, case()) == {}
    found = run(views, m0=[passed(9, 2, 20.5)], m1=[resumed])
    assert at_moment("joined", found, both, case()) == dict.fromkeys(both, 20.0)
    later = run(views, m0=[passed(99, 2, 21.5)], m1=[resumed])
    assert at_moment("joined", later, both, case()) == {}


@pytest.mark.parametrize(
    ("members", "living", "doubts", "spare", "yes"),
    [
        (["m0"], ALL, (), 1, True),
        (["m0"], ALL, (), 0, False),
        (["m0"], ("m0", "m1"), (), 1, False),
        (["m0"], ("m0", "m1"), (), 2, True),
        (["m0"], ALL, {"m2"}, 1, False),
        (["m7"], (*ALL, "m7"), (), 0, False),
    ],
)
def test_all_who_have_gone_since_the_job_told_count(
    members: list[str], living: tuple[str, ...], doubts: set[str], spare: int, yes: bool
) -> None:
    told = Told(members=ALL, spare=spare)
    assert may_lose_since(members, told=told, living=living, doubts=doubts).yes is yes


def test_nobody_is_taken_before_the_job_has_told() -> None:
    assert not may_lose_since(["m0"], told=None, living=ALL, doubts=()).yes


def test_every_moment_is_drawn_and_only_for_losses() -> None:
    many = [draw(seed) for seed in range(400)]
    assert {fault.when for each in many for fault in each.faults} == set(cases.MOMENTS)
    at_moments = [(each, fault) for each in many for fault in each.faults if fault.when != "random"]
    assert {(fault.kind, fault.target) for _, fault in at_moments} == {("kill", "member"), ("kill", "node")}
    assert {fault.when for each, fault in at_moments if each.training.backups == 0} == {"start"}
    assert {each.training.backups for each, fault in at_moments if fault.when == "recovering"} == {2, "all"}


def test_what_was_told_does_not_hold_once_a_newcomer_has_got_states() -> None:
    told = Told(members=("m1", "m2"), spare=1)
    assert still_told(told, []) is told
    assert still_told(told, [("m1",)]) is told
    assert still_told(told, [("m1", "m2", "m4"), ("m1", "m2")]) is None
    assert still_told(None, []) is None
