"""comm/groups/folding.py: the same bits, whoever holds what."""

from __future__ import annotations

import random
from typing import get_args

import pytest
import torch

from elastrain.comm.collectives import algorithms
from elastrain.comm.groups.communicator import Communicator
from elastrain.comm.groups.folding import fold, split
from tests.contract.comm_tools import Transport
from tests.contract.test_comm_collectives import party

pytestmark = pytest.mark.parametrize("transport", get_args(Transport))


def _sum(leaves: list[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    """The documented tree, written out plainly."""
    if stop - start == 1:
        return leaves[start].clone()
    middle = split(start, stop)
    return _sum(leaves, start, middle) + _sum(leaves, middle, stop)


def _nodes(generator: random.Random, start: int, stop: int) -> list[tuple[int, int]]:
    """Some cover of the leaves by nodes."""
    if stop - start == 1 or generator.random() < 0.3:
        return [(start, stop)]
    middle = split(start, stop)
    return _nodes(generator, start, middle) + _nodes(generator, middle, stop)


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32], ids=str)
def test_the_bits_do_not_depend_on_who_holds_what(transport: Transport, world: int, dtype: torch.dtype) -> None:
    generator = random.Random(world)
    with party(transport, world) as made:
        for leaves, numel in ((1, 5), (6, 1000), (16, 70), (13, 20_000)):
            data = [(torch.randn(numel, dtype=torch.float64) * 1000).to(dtype) for _ in range(leaves)]
            wanted = _sum(data, 0, leaves)
            for _ in range(2):
                held: list[dict[tuple[int, int], torch.Tensor]] = [{} for _ in range(world)]
                for node in _nodes(generator, 0, leaves):
                    generator.choice(held)[node] = _sum(data, *node)

                def act(comm: Communicator, rank: int, held=held, leaves=leaves, numel=numel) -> torch.Tensor:  # type: ignore[no-untyped-def]
                    out = torch.empty(numel, dtype=dtype)
                    fold(comm.world, held[rank], out, leaves=leaves)
                    return out

                assert all(torch.equal(out, wanted) for out in made.each(act))


def test_it_is_the_sum_of_all_reduce_where_each_rank_holds_its_leaf(transport: Transport) -> None:
    with party(transport, 4) as made:
        data = [torch.randn(3000) for _ in range(4)]

        def act(comm: Communicator, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
            reduced, folded = data[rank].clone().view(30, 100), torch.empty(100, 30).t()
            comm.world.all_reduce(reduced).wait()
            fold(comm.world, {(rank, rank + 1): data[rank].view(30, 100)}, folded, leaves=4)
            return reduced, folded

        assert all(torch.equal(*found) for found in made.each(act))


def test_gaps_overlaps_and_what_is_no_node_are_named_on_all_members(transport: Transport) -> None:
    one, out = torch.ones(3), torch.empty(3)
    cases: list[tuple[dict[tuple[int, int], torch.Tensor], dict[tuple[int, int], torch.Tensor]]] = [
        ({(0, 2): one}, {(3, 4): one}),
        ({(0, 2): one}, {(1, 2): one, (2, 4): one}),
        ({(0, 1): one}, {(1, 3): one, (3, 4): one}),
        ({(0, 4): one}, {(0, 4): one}),
        ({}, {}),
        ({(0, 4): one}, {(4, 6): one}),
    ]
    with party(transport, 2) as made:
        for held in cases:
            said = made.each(lambda comm, rank: fold(comm.world, held[rank], out.clone(), leaves=4))  # noqa: B023
            assert all(isinstance(error, ValueError) and "cover 4 leaves once" in str(error) for error in said)
        said = made.each(lambda comm, rank: fold(comm.world, {}, out.clone(), leaves=4 + rank))
        assert all("different numbers of leaves: [4, 5]" in str(error) for error in said)
        with pytest.raises(ValueError, match="rounded already"):
            fold(made.comms["a"].world, {}, out.half(), leaves=1)
        with pytest.raises(ValueError, match=r"float32\[3\] expected for \(0, 1\); got torch.float32\[4\]"):
            fold(made.comms["a"].world, {(0, 1): torch.ones(4)}, out, leaves=1)


def test_the_tree_is_the_one_of_the_other_reductions(transport: Transport) -> None:
    for world in range(1, 20):
        names = [str(rank) for rank in range(world)]
        for left, right in algorithms.tree(world):
            names[left] = f"({names[left]}+{names[right]})"

        def spell(start: int, stop: int) -> str:
            if stop - start == 1:
                return str(start)
            middle = split(start, stop)
            return f"({spell(start, middle)}+{spell(middle, stop)})"

        assert names[0] == spell(0, world)
