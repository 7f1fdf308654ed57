"""The sums and copies of a large all_reduce without a word between the ranks: what waiting less could reach at most."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from elastrain.comm import algorithms
from elastrain.comm.memory import Mapping, create_sealed, open_sealed, reserve, use_huge_pages
from elastrain.comm.operations import CHUNK_BYTES
from elastrain.comm.reducing import fold

_CHUNK = CHUNK_BYTES // 4  # float32 elements


class Floor:
    """Every rank's tensor of `numel` float32 elements and its sums of one chunk, in memory that all read."""

    def __init__(self, numel: int, gloo: dist.ProcessGroup) -> None:
        self._rank, self._world = gloo.rank(), gloo.size()
        self._numel = numel
        size_bytes = 4 * (numel + _CHUNK)
        fd, mapping = create_sealed("floor", size_bytes)
        reserve(fd, 0, size_bytes)
        use_huge_pages(mapping.address, size_bytes)
        places: list[tuple[int, int]] = [(0, 0)] * self._world
        dist.all_gather_object(places, (os.getpid(), fd), gloo)
        self._mappings = [
            mapping if rank == self._rank else _of_peer(*place, size_bytes) for rank, place in enumerate(places)
        ]
        dist.barrier(gloo)
        os.close(fd)
        all_of_them = [torch.frombuffer(one.view(0, size_bytes), dtype=torch.float32) for one in self._mappings]
        self._tensors = [whole[:numel] for whole in all_of_them]
        self._sums = [whole[numel:] for whole in all_of_them]

    def __call__(self) -> None:
        """My share of one all_reduce of what lies there, of which nothing is to be expected."""
        own = self._tensors[self._rank]
        for start, stop in algorithms.chunks(self._numel, _CHUNK):
            slices = algorithms.cut(stop - start, self._world)
            for rank in (self._rank, *algorithms.others(self._rank, self._world)):
                first, end = slices[rank]
                target, summed = own[start + first : start + end], self._sums[rank][: end - first]
                if rank == self._rank:
                    fold([tensor[start + first : start + end] for tensor in self._tensors], "sum", target)
                    summed.copy_(target)
                else:
                    target.copy_(summed)


def _of_peer(process: int, fd: int, size_bytes: int) -> Mapping:
    opened = os.open(f"/proc/{process}/fd/{fd}", os.O_RDONLY)
    try:
        return open_sealed(opened, size_bytes)
    finally:
        os.close(opened)
