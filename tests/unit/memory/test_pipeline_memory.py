"""What tasks of a pipeline take of memory, and what is said where a limit is too small for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain.job.placement import Holders
from elastrain.memory.held_shards import held_by, shards_bytes, sums_bytes
from elastrain.memory.memory_budget import Needs, at_the_end, slots_needed
from elastrain.memory.pipeline_memory import Lack, Load, ModelBytes, TaskBytes, advice, heaviest_bytes, task_bytes
from elastrain.pipeline.graph import BlockGraph, CrossingTensor, IllegalCut
from elastrain.pipeline.open_tasks import StepShape
from elastrain.pipeline.pipeline_plan import Task

MIB = 1 << 20
CROSSING = CrossingTensor(shape=(MIB // 4,), stride=(1,), dtype="float32", itemsize=4, requires_grad=True)
"""Of one MiB, and a gradient of as much."""
GRAPH = BlockGraph(
    blocks=("embed", "first", "second", "head"),
    flops=(1, 10, 10, 5),
    crossings=((), (CROSSING,), (CROSSING,), (CROSSING,), ()),
)
MODEL = ModelBytes(
    graph=GRAPH,
    places=(0, 1, 2, 3),
    parameters=(8 * MIB, 2 * MIB, 2 * MIB, 4 * MIB),
    gradients=(8 * MIB, 2 * MIB, 2 * MIB, 4 * MIB),
    saved=(1 * MIB, 10 * MIB, 20 * MIB, 3 * MIB),
)
SHAPE = StepShape(number=3, micro_batches=4, run_length=1, blocks=4)
LACK = Lack(members=4, left_bytes=0, missing_bytes=1 << 40, activations_leave=False)


def load(begin: int, end: int, runs: range = range(4), in_flight: int = 2) -> Load:
    return Load(tasks=tuple(Task(run, begin, end, "m0") for run in runs), shape=SHAPE, in_flight=in_flight)


def test_activations_are_those_of_own_blocks_as_often_as_they_are_in_flight() -> None:
    assert task_bytes(MODEL, load(1, 3)).activations_bytes == 2 * 30 * MIB
    assert task_bytes(MODEL, load(1, 2)).activations_bytes == 2 * 10 * MIB
    assert task_bytes(MODEL, load(1, 2, in_flight=3)).activations_bytes == 3 * 10 * MIB


def test_no_more_is_in_flight_than_there_are_micro_batches() -> None:
    assert task_bytes(MODEL, load(1, 2, runs=range(1))).activations_bytes == 10 * MIB
    long = replace(load(1, 2, runs=range(1)), shape=replace(SHAPE, micro_batches=6, run_length=3))
    assert task_bytes(MODEL, long).activations_bytes == 2 * 10 * MIB


def test_stretches_of_one_member_are_in_flight_side_by_side() -> None:
    both = Load(tasks=(*load(1, 2).tasks, *load(2, 3, range(1)).tasks), shape=SHAPE, in_flight=2)
    assert task_bytes(MODEL, both).activations_bytes == (2 * 10 + 20) * MIB


def test_gradients_are_copies_of_own_blocks_only() -> None:
    # Four runs that fold to one: two whole ones wait for a third that is being computed.
    assert task_bytes(MODEL, load(1, 3)).gradients_bytes == 3 * 4 * MIB
    assert task_bytes(MODEL, load(1, 3, runs=range(1))).gradients_bytes == 4 * MIB
    assert task_bytes(replace(MODEL, places=(0, 1, 1, 3)), load(1, 2, runs=range(1))).gradients_bytes == 4 * MIB


def test_all_boundary_tensors_of_a_step_stay_until_it_is_committed() -> None:
    # Four activations behind it and four gradients before it, and what two in flight hand on.
    assert task_bytes(MODEL, load(1, 3)).boundaries_bytes == (4 + 4 + 2) * MIB
    assert task_bytes(MODEL, load(0, 2)).boundaries_bytes == (4 + 2) * MIB
    assert task_bytes(MODEL, load(2, 4)).boundaries_bytes == 4 * MIB
    assert task_bytes(MODEL, load(0, 4)).boundaries_bytes == 0
    assert task_bytes(MODEL, replace(load(1, 3), tasks=())) == TaskBytes()


def test_between_nodes_what_is_received_is_there_once_more() -> None:
    assert task_bytes(MODEL, replace(load(1, 3), copies_received=True)).boundaries_bytes == (4 * 4 + 2) * MIB


def test_what_has_no_gradient_crosses_a_cut_one_way_only() -> None:
    one_way = replace(GRAPH, crossings=((), *[(replace(CROSSING, requires_grad=False),)] * 3, ()))
    assert task_bytes(replace(MODEL, graph=one_way), load(1, 3)).boundaries_bytes == (4 + 2) * MIB


def test_the_sentence_names_block_cuts_and_what_would_fit() -> None:
    needed = {stages: heaviest_bytes(MODEL, load(1, 3), stages, LACK) for stages in range(1, 5)}
    assert min(needed, key=lambda stages: needed[stages]) == 2
    found = advice(MODEL, load(1, 3), replace(LACK, left_bytes=needed[2]))
    assert found == (
        "of its blocks 'second' takes most, 44 MiB; legal cuts: before 'first', before 'second', before 'head'; "
        "--stages 2 would fit"
    )


def test_what_would_fit_does_and_no_smaller_number_of_stages() -> None:
    for left_bytes in range(10 * MIB, 400 * MIB, 5 * MIB):
        lack = replace(LACK, left_bytes=left_bytes)
        said = advice(MODEL, load(1, 3), lack)
        fitting = [s for s in range(1, 5) if heaviest_bytes(MODEL, load(1, 3), s, lack) <= left_bytes]
        assert said.endswith(f"--stages {fitting[0]} would fit") if fitting else "larger" in said


def test_where_no_number_of_stages_fits_a_larger_limit_is_named() -> None:
    graph = replace(GRAPH, illegal=tuple(IllegalCut(cut=cut, why="so") for cut in (1, 2, 3)))
    model = replace(MODEL, graph=graph)
    missing_bytes = heaviest_bytes(model, load(0, 4), 1, LACK) - 10 * MIB
    found = advice(model, load(0, 4), replace(LACK, left_bytes=10 * MIB))
    assert "legal cuts: none" in found
    assert found.endswith(f"what fits best is --stages 1, with a limit that is {missing_bytes // MIB} MiB larger")


def test_activations_that_leave_for_a_disk_need_no_stages() -> None:
    on_disk = replace(LACK, activations_leave=True)
    assert all(
        heaviest_bytes(MODEL, load(1, 3), s, on_disk) < heaviest_bytes(MODEL, load(1, 3), s, LACK) for s in range(1, 5)
    )
    assert "'embed' takes most, 16 MiB" in advice(MODEL, load(0, 2), on_disk)


def test_before_the_first_commit_every_member_has_all_parameters() -> None:
    own = heaviest_bytes(MODEL, load(1, 3), 4, LACK)
    assert heaviest_bytes(MODEL, load(1, 3), 4, replace(LACK, parameters_bytes=16 * MIB)) > own


@pytest.mark.parametrize(("own_mib", "held_mib"), [(2, 16), (20, 20)])
def test_at_the_end_there_are_all_parameters_and_nothing_in_flight(own_mib: int, held_mib: int) -> None:
    needs = Needs(
        base_bytes=100,
        parameters_bytes=own_mib * MIB,
        gradients_bytes=30,
        shards_bytes=50,
        shards_least_bytes=5,
        activations_bytes=200,
        activations_least_bytes=20,
        boundaries_bytes=7,
    )
    assert needs.total_bytes == 100 + own_mib * MIB + 30 + 50 + 200 + 7
    # Of gradients only what copies take that are on their way: slots and sums go before the blocks come.
    assert at_the_end(needs, 16 * MIB, copying_bytes=9).total_bytes == 100 + held_mib * MIB + 9 + 50


@pytest.mark.parametrize("members", range(2, 9))
def test_a_step_takes_at_least_what_the_whole_model_takes_besides_at_the_end(members: int) -> None:
    """One pipeline of equal blocks and shards, with one backup, and nothing saved or handed on: the hardest case."""
    names, size = [f"m{n}" for n in range(members)], 8 * MIB
    placement = tuple(Holders(name, (names[(n + 1) % members],)) for n, name in enumerate(names))
    held = held_by("m0", [placement], (size,) * members, moments=2.0)
    states_bytes, least_bytes = shards_bytes(held)
    needs = Needs(
        base_bytes=100,
        parameters_bytes=size,
        gradients_bytes=slots_needed(1, (), [0]) * size + sums_bytes(held, members, 0),
        shards_bytes=states_bytes,
        shards_least_bytes=least_bytes,
        activations_bytes=0,
        activations_least_bytes=0,
    )
    assert at_the_end(needs, members * size).total_bytes <= needs.total_bytes
