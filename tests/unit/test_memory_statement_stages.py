"""What each member of a pipeline will hold, stated before a job starts: by the account of its tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from elastrain import memory_statement
from elastrain.memory_statement import MemberBytes, ScriptNeeds, WorkerLimit, state_memory
from elastrain.pipeline.graph import BlockGraph, CrossingTensor
from elastrain.pipeline.room import ModelBytes
from elastrain.pipeline.statement import StagedScript
from elastrain.pipeline.tasks import StepShape

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
    behind_bytes=4 * MIB,
)
TOGETHER = {"m0": "node0", "m1": "node0"}
"""The first has two blocks before the cut in the middle and two micro-batches in flight, the second has one."""


def mib(stated: MemberBytes) -> dict[str, int]:
    return {name: getattr(stated, name) // MIB for name in ("model", "gradients", "activations", "shards", "total")}


def test_in_the_first_step_a_member_has_the_whole_model_and_its_own_tasks() -> None:
    _, second = state_memory(SCRIPT, TOGETHER, STAGED)
    assert second.moment == "in the first step"
    # Three copies of its blocks' gradients, 8 MiB of shards with sums and scratch, 4 MiB behind. One micro-batch in
    # flight with 23 MiB, and four gradients that stay until the commit.
    assert mib(second) == {"model": 16, "gradients": 18 + 16 + 4, "activations": 23 + 4, "shards": 16, "total": 305}


def test_while_holders_move_a_member_has_the_blocks_of_its_shards_and_what_is_on_its_way() -> None:
    # The second member was given the shard of `first`, which the first one computes with.
    first, second = state_memory(SCRIPT, TOGETHER, replace(STAGED, copied_bytes=4 * MIB))
    assert first.moment == second.moment == "while holders move"
    assert mib(second) == {"model": 6 + 2, "gradients": 38 + 24, "activations": 27, "shards": 16, "total": 321}
    assert mib(first) == {"model": 10, "gradients": 50 + 4 + 24, "activations": 28, "shards": 20, "total": 344}


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
    stated = state_memory(script, dict.fromkeys((f"m{n}" for n in range(members)), "node0"), staged)
    assert "at the end" not in {each.moment for each in stated}


def test_between_nodes_what_is_received_counts_too() -> None:
    apart = state_memory(SCRIPT, {"m0": "node0", "m1": "node1"}, STAGED)
    assert [mib(each)["activations"] for each in apart] == [28 + 4, 27 + 4]


def limited(limit_mib: int, *, has_disk: bool) -> tuple[MemberBytes, ...]:
    limit = WorkerLimit(limit_bytes=limit_mib * MIB, has_disk=has_disk, assumed_moments=2.0)
    return state_memory(replace(SCRIPT, limit=limit), TOGETHER, STAGED)


def test_activations_leave_first() -> None:
    assert [each.spill for each in limited(310, has_disk=False)] == [0, 0]
    first, second = limited(300, has_disk=True)
    assert (first.spill, first.total, first.shortfall) == (10 * MIB, 308 * MIB, "")
    assert second.spill == 0


@pytest.mark.parametrize(("has_disk", "costliest"), [(False, "first"), (True, "embed")])
def test_a_limit_that_is_too_small_names_the_costliest_block_and_what_would_fit(has_disk: bool, costliest: str) -> None:
    first, _ = limited(240, has_disk=has_disk)
    assert "too small for this plan" in first.shortfall
    assert f"of its blocks '{costliest}' takes most" in first.shortfall
    assert "legal cuts: before 'first', before 'second', before 'head'" in first.shortfall
    assert "--stages" in first.shortfall


def test_only_rank_0_is_refused_for_what_all_blocks_take_at_the_end() -> None:
    # Whatever they take of the steps: the end is made the narrowest moment of both.
    def short_at_the_end(script: ScriptNeeds, nodes: Mapping[str, str], work: Any) -> MemberBytes:
        return replace(stated, member=work.member, moment=work.moment, shortfall="too small" if work.is_end else "")

    stated = state_memory(SCRIPT, TOGETHER, STAGED)[0]
    with patch.object(memory_statement, "_member", short_at_the_end):
        first, second = state_memory(SCRIPT, TOGETHER, STAGED)
    assert (first.moment, first.shortfall) == ("at the end", "too small")
    assert second.shortfall == "" and second.moment != "at the end"
