"""The account of a plan at run time: when memory that others have let go of is given back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastrain.job.values import Shape
from elastrain.job.world import Member, View
from elastrain.memory import member_account
from elastrain.memory.member_account import MemberAccount, ModelSizes
from elastrain.memory.memory_budget import Needs
from elastrain.memory.pipeline_memory import Load, TaskBytes
from elastrain.runtime.memory import planned_work
from elastrain.runtime.memory.planned_work import PlannedWork
from elastrain.runtime.memory.process_memory import HeldInStep


def test_in_the_first_step_of_other_tasks_memory_is_given_back_until_the_step_is_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trimmed: list[None] = []
    monkeypatch.setattr(planned_work, "model_bytes", lambda *_: object())
    monkeypatch.setattr(member_account, "task_bytes", lambda _, load: TaskBytes(boundaries_bytes=load.in_flight // 2))
    executor: Any = SimpleNamespace(model=None, states=SimpleNamespace(moments=lambda: None))
    work = PlannedWork("m0", executor, lambda: trimmed.append(None))
    work.account = MemberAccount(
        me="m0",
        shape=Shape(runs=1, blocks=1, shards=(), backups=0),
        sizes=ModelSizes(masters=False, slot_bytes=0, whole_bytes=0),
        view=View(generation=0, members=(Member(id="m0", node="node0"),)),
        placements=((), ()),
    )
    work.trace(SimpleNamespace(), ())  # type: ignore[arg-type]

    def trims(what: Any) -> int:
        before = len(trimmed)
        what()
        return len(trimmed) - before

    shape: Any = None
    loads = [Load(tasks=(), shape=shape, in_flight=n) for n in (2, 3, 4)]
    left = work.leftovers
    assert trims(left.give_back) == 0
    assert trims(lambda: work.take(loads[0], ())) == 1
    assert trims(left.give_back) == trims(left.give_back) == trims(left.end) == 1
    assert trims(left.give_back) == trims(lambda: work.take(loads[1], ())) == trims(left.end) == 0
    assert trims(lambda: work.take(loads[2], ())) == trims(left.give_back) == 1


@pytest.mark.parametrize("runs", [1, 2, 7, 16, 33])
def test_no_share_of_the_runs_needs_more_slots_than_the_growth_that_was_planned_for(runs: int) -> None:
    view = View(generation=0, members=tuple(Member(id=m, node="node0") for m in ("m0", "m1", "m2")))
    work = PlannedWork("m1", SimpleNamespace(), lambda: None)  # type: ignore[arg-type]
    work.account = MemberAccount(
        me="m1",
        shape=Shape(runs=runs, blocks=1, shards=(), backups=0),
        sizes=ModelSizes(masters=False, slot_bytes=10, whole_bytes=0),
        view=view,
        placements=((), ()),
    )
    equal = work.share({})
    most_bytes = equal.gradients_bytes + work.growth_bytes
    found = {
        work.share({"m0": a, "m1": b, "m2": 100}).gradients_bytes for a in (1, 30, 300) for b in (1, 50, 200, 9000)
    }
    assert max(found) <= most_bytes
    assert len(found) > 1 or runs < 4, "the slots of a larger share are planned for"


def test_a_new_plan_takes_at_most_the_last_peak_and_what_its_parts_take_more() -> None:
    held, tasks = HeldInStep(), TaskBytes(gradients_bytes=9, boundaries_bytes=5, activations_bytes=7)
    needs = Needs(
        base_bytes=10_000,
        parameters_bytes=100,
        gradients_bytes=60,
        shards_bytes=30,
        shards_least_bytes=0,
        activations_bytes=7,
        activations_least_bytes=0,
        boundaries_bytes=5,
    )
    assert held.most_bytes(needs, tasks) is None, "no step was measured"
    for gradients_bytes in (60, 20):
        held.note(gradients_bytes=gradients_bytes)
    held.end(500, 100, 30)
    assert held.most_bytes(needs, tasks) == 500, "what a commit gives back was a part of the peak"
    more = replace(needs, parameters_bytes=101, gradients_bytes=62, shards_bytes=34, activations_bytes=15)
    assert held.most_bytes(more, tasks) == 500 + 1 + 2 + 4 + 8
    less = replace(needs, parameters_bytes=1, boundaries_bytes=21)
    assert held.most_bytes(less, tasks) == 500 + 16, "a part that shrinks makes no room for others"
    held.end(400, 100, 30)
    assert held.most_bytes(needs, tasks) == 400 + 60, "the gradients of the step before do not count"
