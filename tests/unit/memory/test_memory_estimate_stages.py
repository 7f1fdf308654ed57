"""What each member of a pipeline will hold, stated before a job starts: by the account of its tasks."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from unittest.mock import patch

import pytest

from elastrain.job.values import Pipelining, Shape, ShardShape
from elastrain.memory.member_account import Limit, ModelSizes
from elastrain.memory.memory_budget import AT_THE_END, Fit, Needs, Shortfall
from elastrain.memory.memory_estimate import ENDED, MOVING, STEP, MemberBytes, ScriptNeeds, state_memory
from elastrain.memory.pipeline_memory import ModelBytes
from elastrain.pipeline.graph import BlockGraph, CrossingTensor

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
SHAPE = Shape(
    runs=4,
    blocks=4,
    shards=tuple(ShardShape(size_bytes=size_bytes, lanes=(block,)) for block, size_bytes in enumerate(SIZES)),
    backups=0,
    pipelining=Pipelining(stages=2, micro_batches=4, run_length=1),
)
SCRIPT = ScriptNeeds(
    shape=SHAPE,
    sizes=ModelSizes(masters=False, slot_bytes=16 * MIB, whole_bytes=16 * MIB),
    moments=(2.0,) * 4,
    base_bytes=200 * MIB,
    landing_bytes=0,
)
TOGETHER = {"m0": "node0", "m1": "node0"}
"""The first has two blocks before the cut in the middle and two micro-batches in flight, the second has one."""


def mib(stated: MemberBytes, name: str) -> dict[str, int]:
    """At this moment: the parts that differ between members."""
    moment = next(each for each in stated.moments if each.moment == name)
    parts = {part: size_bytes // MIB for part, size_bytes in moment.parts.items() if size_bytes}
    return {part: size for part, size in parts.items() if part not in ("base", "computing")}


def test_until_holders_move_a_member_has_the_whole_model_and_its_own_tasks() -> None:
    _, second = state_memory(SCRIPT, TOGETHER, MODEL)
    # Three copies of its blocks' gradients, a sum and scratch for its shards of 8 MiB. One micro-batch in flight with
    # 23 MiB, and four gradients that stay until the commit.
    assert mib(second, STEP) == {
        "model": 16,
        "gradients": 18 + 8 + 8,
        "activations": 23,
        "boundaries": 4,
        "shards": 16,
    }


def test_while_holders_move_a_member_has_the_blocks_of_its_shards_and_what_is_on_its_way() -> None:
    # The second member was given the shard of `first`, which the first one computes with. It gives it away later.
    first, second = state_memory(SCRIPT, TOGETHER, MODEL)
    assert mib(second, MOVING) == {
        "model": 6 + 2,
        "gradients": 18 + 8 + 8,
        "activations": 23,
        "boundaries": 4,
        "shards": 16,
        "copies": 12,
    }
    assert mib(first, MOVING) == {
        "model": 10,
        "gradients": 30 + 10 + 10,
        "activations": 22,
        "boundaries": 6,
        "shards": 20,
        "copies": 12,
    }
    assert mib(first, ENDED) == {"model": 16, "shards": 20, "copies": 12}


def test_no_more_is_on_its_way_than_there_is_to_move() -> None:
    # One shard of 2 MiB moves, at its giver and at its receiver, with as much state as Adam has.
    first, _ = state_memory(SCRIPT, TOGETHER, MODEL)
    assert mib(first, MOVING)["copies"] == 2 * 2 * 3
    stay = state_memory(replace(SCRIPT, shape=replace(SHAPE, backups=1)), TOGETHER, MODEL)
    assert ["copies" in mib(each, MOVING) for each in stay] == [False, False], "both hold every shard already"


def test_a_shard_that_changes_its_role_counts_once_with_the_larger_one() -> None:
    for stated in state_memory(replace(SCRIPT, shape=replace(SHAPE, backups=1)), TOGETHER, MODEL):
        held = mib(stated, MOVING)
        # 16 MiB of shards: two values of Adam for each as a primary, six as a backup; some are both in turn.
        states = held["shards"] + held["backups"] + held["unverified"]
        assert 2 * 8 + 6 * 8 <= states <= 2 * 8 + 6 * 8 + 4 * 2 * 2


@pytest.mark.parametrize("members", [2, 3, 8, *(pytest.param(count, marks=pytest.mark.slow) for count in range(4, 8))])
@pytest.mark.parametrize("backups", [0, 1, 2])
def test_who_has_room_to_train_has_room_for_the_whole_model_at_the_end(members: int, backups: int) -> None:
    """Although activations and what crosses the cuts are nothing: gradients go before the blocks come."""
    sizes = (4 * MIB,) * 8
    graph = BlockGraph(blocks=tuple(f"layers.{n}" for n in range(8)), flops=(1,) * 8, crossings=((),) * 9)
    model = ModelBytes(graph=graph, places=tuple(range(8)), parameters=sizes, gradients=sizes, saved=(0,) * 8)
    shape = Shape(
        runs=1,
        blocks=8,
        shards=tuple(ShardShape(size_bytes=size_bytes, lanes=(block,)) for block, size_bytes in enumerate(sizes)),
        backups=backups,
        pipelining=Pipelining(stages=members, micro_batches=1, run_length=1),
    )
    whole = replace(SCRIPT.sizes, slot_bytes=32 * MIB, whole_bytes=32 * MIB)
    script = replace(SCRIPT, shape=shape, sizes=whole, moments=(2.0,) * 8)
    nodes = dict.fromkeys((f"m{n}" for n in range(members)), "node0")

    def refused(limit_mib: int) -> list[str]:
        limited = replace(script, limit=Limit(limit_bytes=limit_mib * MIB, has_disk=False))
        return [each.shortfall for each in state_memory(limited, nodes, model) if each.shortfall]

    def trains(limit_mib: int) -> bool:
        return all(AT_THE_END in each for each in refused(limit_mib))

    smallest_mib = bisect_left(range(1024), True, lo=200, key=trains)
    assert smallest_mib > 200
    assert not refused(smallest_mib)


def test_between_nodes_what_is_received_counts_too() -> None:
    apart = state_memory(SCRIPT, {"m0": "node0", "m1": "node1"}, MODEL)
    assert [mib(each, STEP)["boundaries"] for each in apart] == [6 + 4, 4 + 4]


def limited(limit_mib: int, *, has_disk: bool) -> tuple[MemberBytes, ...]:
    limit = Limit(limit_bytes=limit_mib * MIB, has_disk=has_disk)
    return state_memory(replace(SCRIPT, limit=limit), TOGETHER, MODEL)


def test_activations_leave_first() -> None:
    assert [each.worst.spill for each in limited(320, has_disk=False)] == [0, 0]
    first, second = limited(300, has_disk=True)
    spills = {each.moment: each.spill // MIB for each in first.moments}
    # While holders move it is given a shard of 2 MiB, whose state leaves no room for that much.
    assert spills == {STEP: 6, MOVING: 20, ENDED: 0}
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
    def short_at_the_end(_: Limit, needs: Needs, __: object) -> Fit | Shortfall:
        if needs.gradients_bytes > 12 * MIB:
            return Fit(activations_bytes=0, shards_on_disk_bytes=0, reason="")
        return Shortfall(missing_bytes=1, reason="too small")

    with patch.object(Limit, "fit", short_at_the_end):
        first, second = limited(300, has_disk=False)
    assert first.shortfall == f"too small{AT_THE_END}" and ENDED in {each.moment for each in first.moments}
    assert second.shortfall == "" and ENDED not in {each.moment for each in second.moments}
