"""Collectives of members on several hosts: forced by the nodes' names, over TCP between them and memory inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from elastrain.comm.collectives import algorithms, hosts
from elastrain.comm.collectives.reducing import Reduction
from elastrain.comm.groups.communicator import Communicator
from elastrain.comm.wire.addresses import MeshConfig
from elastrain.comm.wire.mesh import Mesh
from tests.support.comm_tools import SECRET
from tests.support.party import Party

PLACES = ["xxyy", "xxxyy", "xyxyx"]  # hosts of a, b, c, …


@contextmanager
def _party(places: str) -> Iterator[Party]:
    made = Party("tcp")
    names = "abcdefgh"[: len(places)]
    try:
        for name, node in zip(names, places, strict=True):
            config = MeshConfig(transport="tcp", segment_bytes=4 << 20)
            made.meshes[name] = Mesh(me=name, node=node, job="job", secret=SECRET, config=config)
            made.comms[name] = Communicator(made.meshes[name], timeout_s=20)
        made.view(1, names)
        yield made
    finally:
        made.close()


def _inputs(world: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel + world)
    return [torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world)]


def _expected(inputs: list[torch.Tensor], places: str, *, mean: bool = False) -> torch.Tensor:
    """Each host's ranks, then the hosts, along the documented tree, written out plainly."""
    dtype = inputs[0].dtype
    sums = [i.float() if dtype in (torch.float16, torch.bfloat16) else i.clone() for i in inputs]
    for left, right in hosts.tree([ord(place) for place in places]):
        sums[left] = sums[left] + sums[right]
    return (sums[0] / len(inputs) if mean else sums[0]).to(dtype)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_size_and_algorithm_gives_the_stated_sum_bit_for_bit(places: str, dtype: torch.dtype) -> None:
    with _party(places) as made:
        for numel in (5, 3000, 70_001):
            inputs = _inputs(len(places), numel, dtype)
            for reduction in ("sum", "avg"):
                wanted = _expected(inputs, places, mean=reduction == "avg")

                def act(
                    comm: Communicator, rank: int, inputs: list[torch.Tensor] = inputs, how: Reduction = reduction
                ) -> torch.Tensor:
                    tensor = inputs[rank].clone()
                    comm.world.all_reduce(tensor, how).wait()
                    return tensor

                for result in made.each(act):
                    assert isinstance(result, torch.Tensor), result
                    assert torch.equal(result, wanted), f"{reduction} of {numel}"


def test_the_large_ones_go_by_two_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the test above would say nothing about them."""
    chosen = set()
    choose = algorithms.choose_all_reduce

    def look(*args: int, **words: object) -> tuple[algorithms.AllReduce, str]:
        choice = choose(*args, **words)  # type: ignore[arg-type]
        chosen.add(choice[0])
        return choice

    monkeypatch.setattr(algorithms, "choose_all_reduce", look)
    with _party("xxyy") as made:
        made.each(lambda comm, rank: comm.world.all_reduce(torch.ones(70_001)).wait())
    assert chosen == {algorithms.AllReduce.TWO_LEVELS}


def test_tensors_in_shared_memory_and_others_and_not_contiguous_ones_give_the_same_bits() -> None:
    with _party("xxyy") as made:
        inputs = _inputs(4, 90_000, torch.float32)
        wanted = _expected(inputs, "xxyy").view(300, 300)

        def act(comm: Communicator, rank: int) -> list[torch.Tensor]:
            shared = comm.empty(90_000, torch.float32).view(300, 300)
            shared.copy_(inputs[rank].view(300, 300))
            turned = inputs[rank].view(300, 300).t().contiguous().t()
            for tensor in (shared, turned):
                comm.world.all_reduce(tensor).wait()
            return [shared.clone(), turned]

        for results in made.each(act):
            assert isinstance(results, list), results
            assert all(torch.equal(result, wanted) for result in results)


def test_reduce_and_reduce_scatter_keep_the_same_order() -> None:
    places = "xyxyx"
    with _party(places) as made:
        inputs = _inputs(5, 500, torch.float32)
        wanted = _expected(inputs, places)

        def act(comm: Communicator, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
            reduced, out = inputs[rank].clone(), torch.empty(100)
            comm.world.reduce(reduced, root=2).wait()
            comm.world.reduce_scatter(out, list(inputs[rank].chunk(5))).wait()
            return reduced, out

        results = made.each(act)
        assert torch.equal(results[2][0], wanted)
        for (_, out), right in zip(results, wanted.chunk(5), strict=True):
            assert torch.equal(out, right)


def test_after_a_host_has_lost_a_member_the_order_is_that_of_who_is_left() -> None:
    with _party("xxyy") as made:
        made.each(lambda comm, rank: comm.world.all_reduce(torch.ones(70_001)).wait())
        made.view(2, "acd")
        inputs = _inputs(3, 70_001, torch.float32)

        def act(comm: Communicator, rank: int) -> torch.Tensor:
            tensor = inputs[rank].clone()
            comm.world.all_reduce(tensor).wait()
            return tensor

        for result in made.each(act, "acd"):
            assert torch.equal(result, _expected(inputs, "xyy"))
