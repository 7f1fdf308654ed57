"""Collectives in which each rank sends parts to others and receives theirs: one round, or two for a large all_reduce.

They work over messages and in shared memory alike. No threads, sockets or clocks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elastrain.comm.collectives import algorithms
from elastrain.comm.collectives.algorithms import Partners, Round, Transfer
from elastrain.comm.collectives.reducing import NOTHING, Memory, Participant, Reduction, describe, fold


class Barrier:
    """An operation that moves no data and ends when all ranks have begun it."""

    lends = False

    def __init__(self, participant: Participant, description: str) -> None:
        self.description = description
        self.rounds = algorithms.barrier(participant.rank, participant.world)

    def offer(self, number: int) -> torch.Tensor:
        """Return an empty tensor."""
        return NOTHING

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        """Do nothing."""
        pass  # noqa: PIE790 - a body without effect

    def finish(self, number: int) -> None:
        """Do nothing."""
        pass  # noqa: PIE790 - a body without effect


class Exchange:
    """One round in which a rank sends a tensor to each partner and receives one from each.

    `given` and `wanted` are by rank. A rank's part for itself is copied at once.
    """

    lends = False

    def __init__(
        self,
        participant: Participant,
        description: str,
        partners: Partners,
        *,
        given: Mapping[int, torch.Tensor],
        wanted: Mapping[int, torch.Tensor],
    ) -> None:
        self.description = description
        self._wanted = wanted
        self._staged, places = stage({id(given[to]): given[to] for to in partners.to}, participant.memory)
        sends = tuple(
            Transfer(to=to, start=places[id(given[to])][0], stop=places[id(given[to])][1]) for to in partners.to
        )
        self.rounds: tuple[Round, ...] = (Round(sends=sends, awaits=partners.of),)
        if participant.rank in wanted and participant.rank in given:
            self.take(0, participant.rank, given[participant.rank])

    def offer(self, number: int) -> torch.Tensor:
        """Return the staged copies of all given tensors, one after the other."""
        return self._staged

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        """Copy what the rank sent into the tensor wanted from it. Raises ValueError if the two do not match."""
        wanted = self._wanted[rank]
        if tensor.numel() != wanted.numel() or (tensor.numel() and tensor.dtype != wanted.dtype):
            raise ValueError(f"{describe(wanted)} wanted from rank {rank}, {describe(tensor)} given")
        if wanted.numel():
            wanted.copy_(tensor.view(wanted.shape))

    def finish(self, number: int) -> None:
        """Do nothing: `take` has copied everything."""
        pass  # noqa: PIE790 - a body without effect


class ExchangeReduce:
    """An exchange whose received parts are reduced into `out`. `out` is None on ranks that get no result."""

    lends = False

    def __init__(
        self,
        participant: Participant,
        description: str,
        partners: Partners,
        *,
        given: Mapping[int, torch.Tensor],
        out: torch.Tensor | None,
        reduction: Reduction,
    ) -> None:
        self.description = description
        self._exchange = Exchange(participant, description, partners, given=given, wanted={})
        self.rounds = self._exchange.rounds
        self._out, self._reduction, self._tree = out, reduction, participant.tree
        # `out` may be the given tensor, so it is written only when all parts are here.
        self._parts: dict[int, torch.Tensor] = {}
        if out is not None:
            self._parts[participant.rank] = given[participant.rank].reshape(-1)

    def offer(self, number: int) -> torch.Tensor:
        """Return the staged copies of all given tensors, one after the other."""
        return self._exchange.offer(number)

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        """Keep a rank's part for the reduction. Raises ValueError if its size or dtype differs."""
        own = next(iter(self._parts.values()))
        if tensor.numel() != own.numel() or (tensor.numel() and tensor.dtype != own.dtype):
            raise ValueError(f"{describe(own)} is reduced here, rank {rank} gives {describe(tensor)}")
        self._parts[rank] = tensor

    def finish(self, number: int) -> None:
        """Reduce all parts into `out`."""
        if self._out is not None and self._out.numel():
            summed = torch.empty(self._out.numel(), dtype=self._out.dtype)
            fold([self._parts[rank] for rank in sorted(self._parts)], self._reduction, summed, steps=self._tree)
            self._out.copy_(summed.view(self._out.shape))


class ScatterGatherReduce:
    """all_reduce in two rounds: each rank reduces one slice of all tensors, then takes the other slices.

    Once all reduced slices have arrived, every peer has read its slice of this rank's tensor. So the caller may change
    the tensor, and a tensor in shared memory needs no staging.
    """

    def __init__(self, participant: Participant, description: str, tensor: torch.Tensor, reduction: Reduction) -> None:
        self.description = description
        self.rounds = algorithms.scatter_gather(participant.rank, participant.world, tensor.numel())
        self._slices = algorithms.cut(tensor.numel(), participant.world)
        self._me, self._reduction = participant, reduction
        self.lends = tensor.is_contiguous() and participant.memory.owns(tensor)
        self._given = tensor.view(-1) if self.lends else stage({0: tensor}, participant.memory)[0]
        self._tensor = tensor
        self._result = tensor.view(-1) if tensor.is_contiguous() else torch.empty(tensor.numel(), dtype=tensor.dtype)
        self._sum = self._given[:0]
        start, stop = self._slices[participant.rank]
        self._parts = [self._given[start:stop]] * participant.world

    def offer(self, number: int) -> torch.Tensor:
        """Return this rank's tensor in the first round, its reduced slice in the second."""
        return self._sum if number else self._given

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        """Keep a part to be reduced (first round), or copy a reduced slice into the result (second round)."""
        if number == 0:
            self._parts[rank] = tensor
        else:
            start, stop = self._slices[rank]
            self._result[start:stop].copy_(tensor)

    def finish(self, number: int) -> None:
        """Reduce this rank's slice (first round), or complete the result (second round)."""
        start, stop = self._slices[self._me.rank]
        if number == 0:
            if stop > start:
                self._sum = self._me.memory.scratch(stop - start, self._given.dtype)
                fold(self._parts, self._reduction, self._sum, steps=self._me.tree)
            self._parts = []
        else:
            self._result[start:stop].copy_(self._sum)
            if not self._tensor.is_contiguous():
                self._tensor.copy_(self._result.view(self._tensor.shape))


def stage(tensors: Mapping[int, torch.Tensor], memory: Memory) -> tuple[torch.Tensor, dict[int, tuple[int, int]]]:
    """Copy tensors of one dtype one after the other; returns the copy and the place of each tensor in it."""
    places: dict[int, tuple[int, int]] = {}
    total, dtype = sum(tensor.numel() for tensor in tensors.values()), torch.float32
    for key, tensor in tensors.items():
        start = max((stop for _, stop in places.values()), default=0)
        places[key], dtype = (start, start + tensor.numel()), tensor.dtype
    staged = memory.scratch(total, dtype) if total else torch.empty(0, dtype=dtype)
    for key, tensor in tensors.items():
        start, stop = places[key]
        staged[start:stop].view(tensor.shape).copy_(tensor)
    return staged, places
