"""The sums and copies of a large all_reduce without the communicator: beside them its words and waits show."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from elastrain.comm.collectives import algorithms
from elastrain.comm.collectives.reducing import CHUNK_BYTES, fold
from elastrain.comm.shm.shared_memory import (
    Mapping,
    create_sealed,
    futex_wait,
    futex_wake_all,
    open_sealed,
    reserve,
    use_huge_pages,
)

_CHUNK = CHUNK_BYTES // 4  # float32 elements
_COUNT_BYTES = 64  # the last of a rank's memory: a futex word, how often it has met the others
_WAIT_S = 60.0


class Floor:
    """Every rank's tensor of `numel` float32 elements and its sums of one chunk, in memory that all read.

    `meets`: all wait for each other before the sums of a chunk and before they take them, as an all_reduce has to; else
    there is not a word between the ranks.
    """

    def __init__(self, numel: int, gloo: dist.ProcessGroup, *, meets: bool) -> None:
        self._rank, self._world = gloo.rank(), gloo.size()
        self._numel, self._meets, self._met = numel, meets, 0
        size_bytes = 4 * (numel + _CHUNK) + _COUNT_BYTES
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
        self._counts = [one.view(size_bytes - _COUNT_BYTES, _COUNT_BYTES).cast("I") for one in self._mappings]
        self._addresses = [one.address + size_bytes - _COUNT_BYTES for one in self._mappings]
        self._tensors = [whole[:numel] for whole in all_of_them]
        self._sums = [whole[numel:] for whole in all_of_them]

    def __call__(self) -> None:
        """My share of one all_reduce of what lies there, of which nothing is to be expected."""
        own = self._tensors[self._rank]
        for start, stop in algorithms.chunks(self._numel, _CHUNK):
            slices = algorithms.cut(stop - start, self._world)
            first, end = slices[self._rank]
            target = own[start + first : start + end]
            self._meet()
            fold([tensor[start + first : start + end] for tensor in self._tensors], "sum", target)
            self._sums[self._rank][: end - first].copy_(target)
            self._meet()
            for rank in algorithms.others(self._rank, self._world):
                first, end = slices[rank]
                own[start + first : start + end].copy_(self._sums[rank][: end - first])

    def _meet(self) -> None:
        if not self._meets:
            return
        self._met += 1
        self._counts[self._rank][0] = self._met
        futex_wake_all(self._addresses[self._rank])
        for rank in algorithms.others(self._rank, self._world):
            while (count := self._counts[rank][0]) < self._met:
                futex_wait(self._addresses[rank], count, _WAIT_S)


def _of_peer(process: int, fd: int, size_bytes: int) -> Mapping:
    opened = os.open(f"/proc/{process}/fd/{fd}", os.O_RDONLY)
    try:
        return open_sealed(opened, size_bytes)
    finally:
        os.close(opened)
