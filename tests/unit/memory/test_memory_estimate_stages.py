"""What each member of a pipeline will hold, stated before a job starts: by the account of its tasks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from elastrain.memory import memory_estimate
from elastrain.memory.memory_budget import AT_THE_END
from elastrain.memory.memory_estimate import MemberBytes, ScriptNeeds, WorkerLimit, state_memory
from elastrain.memory.memory_moments import ADDING, COMPUTING, ENDED, VERIFYING
from elastrain.memory.pipeline_memory import ModelBytes, StagedScript
from elastrain.pipeline.graph import BlockGraph, CrossingTensor
from elastrain.pipeline.open_tasks import StepShape

MIB = 1 << 20
CROSSING = CrossingTensor(shape=(MIB // 4,), stride=(1,), dtype="float32", itemsize=4, requires_grad=True)
"""Of one MiB, and a gradient of as much."""
SIZES = (8 * MIB, 2 * MIB, 2 * MIB, 4 * MIB)
"""Of each block, which is a shard of its own."""
MODEL = ModelBytes(
    graph=BlockGraph(
        blocks=("embed", "first", "second", "head"),
        flops=(1, 10, 10, 5),
        crossings=((), (CROSSING,), (CROSSING,), (CROSSING,), ()),
    ),
    places=(0, 1, 2, 3),
    parameters=SIZES,
    gradients=SIZES,
    saved=(1 * MIB, 10 * MIB, 20 * MIB, 3 * MIB),
)
STAGED = StagedScript(
    model=MODEL,
    stages=2,
    shape=StepShape(number=0, micro_batches=4, run_length=1, blocks=4),
    lanes=((0,), (1,), (2,), (3,)),
    copied_bytes=0,
)
SCRIPT = ScriptNeeds(
    sizes=SIZES,
    moments=(2.0,) * 4,
    masters=False,
    model_bytes=16 * MIB,
    slot_bytes=16 * MIB,
    runs=4,
    backups=0,
    base_bytes=200 * MIB,
    landing_bytes=0,
)
TOGETHER = {"m0": "node0", "m1": "node0"}
"""The first has two blocks before the cut in the middle and two micro-batches in flight, the second has one."""


FIRST, MOVING = f"in the first step, {COMPUTING}", "while holders move, "


def mib(stated: MemberBytes, name: str) -> dict[str, int]:
    """At this moment: the parts that differ between members."""
    moment = next(each for each in stated.moments if each.moment == name)
    parts = {part: size_bytes // MIB for part, size_bytes in moment.parts.items() if size_bytes}
    return {part: size for part, size in parts.items() if part not in ("base", "computing")}


def test_in_the_first_step_a_member_has_the_whole_model_and_its_own_tasks() -> None:
    _, second = state_memory(SCRIPT, TOGETHER, STAGED)
    # Three copies of its blocks' gradients. One micro-batch in flight with 23 MiB, and four gradients that stay until
    # the commit.
    assert mib(second, FIRST) == {"model": 16, "gradients": 18, "activations": 23, "boundaries": 4}


def test_while_holders_move_a_member_has_the_blocks_of_its_shards_and_what_is_on_its_way() -> None:
    # The second member was given the shard of `first`, which the first one computes with: it copies the finished
    # gradient, and has scratch for 8 MiB of shards.
    first, second = state_memory(SCRIPT, TOGETHER, replace(STAGED, copied_bytes=4 * MIB))
    name = MOVING + COMPUTING
    assert mib(second, name) == {
        "model": 6 + 2,
        "gradients": 18 + 2 + 8,
        "activations": 23,
        "boundaries": 4,
        "shards": 16,
        "copies": 12,
    }
    # It takes over 2 MiB of shards later: then it has 10 of them, and none of another one's gradients.
    assert mib(first, name) == {
        "model": 10,
        "gradients": 30 + 10,
        "activations": 22,
        "boundaries": 6,
        "shards": 20,
        "copies": 12,
    }
    # What crosses the cuts stays until the commit; what its graphs held of it is counted, too.
    assert mib(first, MOVING + ADDING) == {k: v for k, v in mib(first, name).items() if k != "activations"}


def test_a_member_does_not_hold_all_that_it_ever_holds_at_once() -> None:
    """With two members and a backup, moving is a change of roles: each shard is held once, as one or the other."""
    script = replace(SCRIPT, backups=1)
    for stated in state_memory(script, TOGETHER, STAGED):
        held = mib(stated, MOVING + VERIFYING)
        assert held["backups"] == held["unverified"]
        assert held["shards"] // 2 + held["backups"] // 3 <= 16 + 2, "16 MiB of shards, of which 2 change hands"


def test_no_more_is_on_its_way_than_there_is() -> None:
    most, more = (state_memory(SCRIPT, TOGETHER, replace(STAGED, copied_bytes=size)) for size in (16 * MIB, 64 * MIB))
    assert most == more


@pytest.mark.parametrize("members", range(2, 9))
@pytest.mark.parametrize("backups", [0, 1, 2])
def test_who_has_room_to_train_has_room_for_the_whole_model_at_the_end(members: int, backups: int) -> None:
    """Although activations and what crosses the cuts are nothing: gradients go before the blocks come."""
    sizes = (4 * MIB,) * 8
    graph = BlockGraph(blocks=tuple(f"layers.{n}" for n in range(8)), flops=(1,) * 8, crossings=((),) * 9)
    model = ModelBytes(graph=graph, places=tuple(range(8)), parameters=sizes, gradients=sizes, saved=(0,) * 8)
    shape = StepShape(number=0, micro_batches=1, run_length=1, blocks=8)
    lanes = tuple((n,) for n in range(8))
    staged = StagedScript(model=model, stages=members, shape=shape, lanes=lanes, copied_bytes=4 * MIB)
    script = replace(
        SCRIPT, sizes=sizes, moments=(2.0,) * 8, model_bytes=32 * MIB, slot_bytes=32 * MIB, runs=1, backups=backups
    )
    nodes = dict.fromkeys((f"m{n}" for n in range(members)), "node0")

    def refused(limit_mib: int) -> list[str]:
        limit = WorkerLimit(limit_bytes=limit_mib * MIB, has_disk=False, assumed_moments=2.0)
        return [each.shortfall for each in state_memory(replace(script, limit=limit), nodes, staged) if each.shortfall]

    def trains(limit_mib: int) -> bool:
        return all(AT_THE_END in each for each in refused(limit_mib))

    smallest_mib = bisect_left(range(1024), True, lo=200, key=trains)
    assert smallest_mib > 200
    assert not refused(smallest_mib)


def test_between_nodes_what_is_received_counts_too() -> None:
    apart = state_memory(SCRIPT, {"m0": "node0", "m1": "node1"}, STAGED)
    assert [mib(each, FIRST)["boundaries"] for each in apart] == [6 + 4, 4 + 4]


def limited(limit_mib: int, *, has_disk: bool) -> tuple[MemberBytes, ...]:
    limit = WorkerLimit(limit_bytes=limit_mib * MIB, has_disk=has_disk, assumed_moments=2.0)
    return state_memory(replace(SCRIPT, limit=limit), TOGETHER, STAGED)


def test_activations_leave_first() -> None:
    assert [each.worst.spill for each in limited(310, has_disk=False)] == [0, 0]
    first, second = limited(300, has_disk=True)
    spills = {each.moment: each.spill // MIB for each in first.moments}
    # While holders move it is given a shard of 2 MiB, whose state leaves no room for that much.
    assert spills == {FIRST: 10, MOVING + COMPUTING: 12, MOVING + ADDING: 0, MOVING + VERIFYING: 12, ENDED: 0}
    assert first.shortfall == ""
    assert all(each.spill == 0 for each in second.moments)


@pytest.mark.parametrize(("has_disk", "costliest"), [(False, "first"), (True, "embed")])
def test_a_limit_that_is_too_small_names_the_costliest_block_and_what_would_fit(has_disk: bool, costliest: str) -> None:
    first, _ = limited(240, has_disk=has_disk)
    assert "too small for this plan" in first.shortfall
    assert f"of its blocks '{costliest}' takes most" in first.shortfall
    assert "legal cuts: before 'first', before 'second', before 'head'" in first.shortfall
    assert "--stages" in first.shortfall


def test_only_rank_0_is_refused_for_what_all_blocks_take_at_the_end() -> None:
    # Whatever they take of the steps: the end is made the narrowest moment of both.
    def short_at_the_end(script: ScriptNeeds, nodes: Mapping[str, str], work: Any) -> Any:
        return frozenset(), 0, "too small" if work.is_end else ""

    with patch.object(memory_estimate, "_leaves", short_at_the_end):
        first, second = state_memory(SCRIPT, TOGETHER, STAGED)
    assert first.shortfall == "too small" and ENDED in {each.moment for each in first.moments}
    assert second.shortfall == "" and ENDED not in {each.moment for each in second.moments}
