"""The large all_reduce of members on several hosts: sums on each host first, in shared memory, then between hosts.

No threads, sockets or clocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elastrain.comm.collectives import hosts
from elastrain.comm.collectives.exchanges import stage
from elastrain.comm.collectives.reducing import Participant, Reduction, accumulate_dtype, describe, fold


class TwoLevelReduce:
    """all_reduce by the four rounds of `hosts.TwoLevels`.

    Sums of half precision travel as float32 and are rounded once, at the end. When the last slice has arrived, every
    owner on this host has read its slice of this rank's tensor, so the caller may change the tensor.
    """

    def __init__(self, participant: Participant, description: str, tensor: torch.Tensor, reduction: Reduction) -> None:
        self.description = description
        self._plan = hosts.two_levels(participant.rank, participant.hosts, tensor.numel())
        self.rounds = self._plan.rounds
        self._me, self._reduction = participant, reduction
        self.lends = tensor.is_contiguous() and participant.memory.owns(tensor)
        self._given = tensor.view(-1) if self.lends else stage({0: tensor}, participant.memory)[0]
        self._tensor = tensor
        self._result = tensor.view(-1) if tensor.is_contiguous() else torch.empty(tensor.numel(), dtype=tensor.dtype)
        start, stop = self._plan.owners.get(participant.rank, (0, 0))
        self._parts = {participant.rank: self._given[start:stop]}
        self._whole = participant.memory.scratch(stop - start, tensor.dtype) if stop > start else self._given[:0]
        self._offered: torch.Tensor = self._given

    def offer(self, number: int) -> torch.Tensor:
        """Return the tensor of this round: the rank's own, the sums of its host, its piece, or its slice."""
        return self._offered

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        """Keep a part to be reduced (rounds 0 and 1), or copy a final piece or slice (rounds 2 and 3)."""
        if number == 0:
            self._keep(rank, tensor, len(self._whole), self._given.dtype)
        elif number == 1:
            start, stop = self._plan.pieces[self._me.rank]
            self._keep(rank, tensor, stop - start, accumulate_dtype(self._given.dtype))
        elif number == 2:
            _copy(rank, tensor, self._whole, self._plan.pieces)
        else:
            _copy(rank, tensor, self._result, self._plan.owners)

    def _keep(self, rank: int, tensor: torch.Tensor, numel: int, dtype: torch.dtype) -> None:
        if tensor.numel() != numel or (numel and tensor.dtype != dtype):
            raise ValueError(f"{describe(self._given)} is reduced here, rank {rank} gives {describe(tensor)}")
        self._parts[rank] = tensor

    def finish(self, number: int) -> None:
        """Reduce over this host (round 0) or all hosts (round 1), or complete slice and result (rounds 2 and 3)."""
        if number == 0:
            self._sum_here()
        elif number == 1:
            self._sum_hosts()
        elif number == 2 and self._me.rank in self._plan.owners:
            self._offered = self._whole
            start, stop = self._plan.owners[self._me.rank]
            self._result[start:stop].copy_(self._whole)
        elif number == 3 and not self._tensor.is_contiguous():
            self._tensor.copy_(self._result.view(self._tensor.shape))

    def _sum_here(self) -> None:
        """Reduce this rank's slice over the ranks of its host."""
        if not len(self._whole):
            return
        summed = self._me.memory.scratch(len(self._whole), accumulate_dtype(self._given.dtype))
        fold(
            [self._parts[rank] for rank in self._plan.here],
            "sum" if self._reduction == "avg" else self._reduction,
            summed,
        )
        start, stop = self._plan.pieces[self._me.rank]
        self._offered, self._parts = summed, {self._me.rank: summed[start:stop]}

    def _sum_hosts(self) -> None:
        """Reduce this rank's piece of its slice over the hosts."""
        start, stop = self._plan.pieces.get(self._me.rank, (0, 0))
        if stop > start:
            parts = [self._parts[rank] for rank in self._plan.colleagues]
            fold(parts, self._reduction, self._whole[start:stop], count=self._me.world)
        self._offered, self._parts = self._whole[start:stop], {}


def _copy(rank: int, tensor: torch.Tensor, out: torch.Tensor, places: Mapping[int, hosts.Interval]) -> None:
    start, stop = places[rank]
    if tensor.numel() != stop - start or (tensor.numel() and tensor.dtype != out.dtype):
        raise ValueError(f"{stop - start} elements of {out.dtype} wanted from rank {rank}, {describe(tensor)} given")
    if stop > start:
        out[start:stop].copy_(tensor)
