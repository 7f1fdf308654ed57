"""The large all_reduce in shared memory: every edge of its chunks, and members of which some lend their tensors."""

from __future__ import annotations

import pytest
import torch

from elastrain.comm.collectives.reducing import CHUNK_BYTES
from elastrain.comm.groups.communicator import Communicator
from tests.contract.comm.test_collectives import _expected, _inputs, party

CHUNK = CHUNK_BYTES // 4  # elements


@pytest.mark.parametrize("lenders", ["", "b", "abc"])
@pytest.mark.parametrize("numel", [CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 17], ids=["1", "1+", "2", "3+"])
def test_chunks_of_every_length_are_summed_one_after_the_other(numel: int, lenders: str) -> None:
    with party("unix", 3) as made:
        inputs = _inputs(3, numel, torch.float32)
        expected = _expected(inputs, "sum")

        def act(comm: Communicator, rank: int) -> list[bool]:
            lends = comm.world.me in lenders
            tensors = [comm.empty(numel, torch.float32) if lends else torch.empty(numel) for _ in range(2)]
            right = []
            for tensor in tensors:  # back to back: the second one writes over what the first one staged
                tensor.copy_(inputs[rank])
                comm.world.all_reduce(tensor).wait()
                right.append(torch.equal(tensor, expected))
                tensor.fill_(float("nan"))  # its caller may do that at once
            return right

        assert made.each(act) == [[True, True]] * 3
