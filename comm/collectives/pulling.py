"""The large all_reduce of members that read each other's memory. No threads, sockets or clocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elastrain.comm.collectives import algorithms
from elastrain.comm.collectives.reducing import CHUNK_BYTES, Participant, Reduction, describe, fold


@dataclass(frozen=True, kw_only=True)
class _Chunks:
    """A flat tensor in chunks of at most `length` elements. Every rank sums one slice of each chunk."""

    rank: int
    world: int
    length: int
    ranges: tuple[tuple[int, int], ...]

    def __contains__(self, index: int) -> bool:
        return 0 <= index < len(self.ranges)

    def slices(self, index: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Return the chunk's begin in the tensor, and the ranks' slices within the chunk."""
        start, stop = self.ranges[index]
        return start, algorithms.cut(stop - start, self.world)

    def place(self, index: int) -> int:
        """Return the offset of the half of a double buffer in which the chunk lies."""
        return index % 2 * self.length


class PulledReduce:
    """all_reduce where members read each other's memory, in chunks that fit the caches.

    Three stages run at once. At step t a rank copies chunk t of its tensor to where the others see it, reduces its
    slice of chunk t - 1 from all ranks, and copies the others' sums of chunk t - 2. Every buffer is double: what is
    overwritten at step t was read by the others before they published step t - 1.

    A tensor in shared memory is read in place: once the sums of a chunk are here, no peer reads that chunk any more.
    """

    def __init__(self, participant: Participant, description: str, tensor: torch.Tensor, reduction: Reduction) -> None:
        if participant.stage is None:
            raise ValueError("members that do not read each other's memory have to send their parts")
        self.description = description
        self._tensor, self._reduction = tensor, reduction
        self._flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
        self.lends = tensor.is_contiguous() and participant.memory.owns(tensor)
        length = CHUNK_BYTES // tensor.itemsize
        ranges = algorithms.chunks(tensor.numel(), length)
        self._chunks = _Chunks(rank=participant.rank, world=participant.world, length=length, ranges=ranges)
        # Peers see by the length if a rank offers its tensor or its stage, so the two lengths must differ.
        staged_numel = 2 * length + (64 if tensor.numel() == 2 * length else 0)
        places = participant.stage().view(tensor.dtype)
        self._sums, self._stage = places[: 2 * length], places[2 * length :][:staged_numel]
        self._parts: dict[int, torch.Tensor] = {}
        self._others_sums: dict[int, torch.Tensor] = {}
        self.rounds = algorithms.pipeline(
            participant.rank, participant.world, len(ranges), given=len(self._given), sums=len(self._sums)
        )

    @property
    def _given(self) -> torch.Tensor:
        return self._flat if self.lends else self._stage

    def offer(self, number: int) -> torch.Tensor:
        """Do the three stages of this step; return this rank's tensor in round 0, its sums afterwards."""
        self._stage_chunk(number)
        self._fold_chunk(number - 1)
        self._gather_chunk(number - 2)
        return self._sums if number else self._given

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        """Keep a rank's tensor (round 0) or sums (round 1) for later rounds. Raises ValueError for a wrong size."""
        numels = (len(self._sums),) if number else (self._flat.numel(), len(self._stage))
        if tensor.dtype != self._flat.dtype or tensor.numel() not in numels:
            raise ValueError(f"{describe(self._flat)} is reduced here, rank {rank} gives {describe(tensor)}")
        (self._others_sums if number else self._parts)[rank] = tensor

    def finish(self, number: int) -> None:
        """After the last round, copy the result to a tensor that is not contiguous."""
        if number == len(self.rounds) - 1 and not self._tensor.is_contiguous():
            self._tensor.copy_(self._flat.view(self._tensor.shape))

    def _stage_chunk(self, index: int) -> None:
        if self.lends or index not in self._chunks:
            return
        start, slices = self._chunks.slices(index)
        place = self._stage[self._chunks.place(index) :]
        mine, last = slices[self._chunks.rank], slices[-1][1]
        for first, end in ((0, mine[0]), (mine[1], last)):  # no other rank reads this rank's slice
            if end > first:
                place[first:end].copy_(self._flat[start + first : start + end])

    def _fold_chunk(self, index: int) -> None:
        if index not in self._chunks:
            return
        start, slices = self._chunks.slices(index)
        first, end = slices[self._chunks.rank]
        if end == first:
            return
        own = self._flat[start + first : start + end]
        parts = [own] * self._chunks.world
        for rank, tensor in self._parts.items():
            at = start if tensor.numel() == self._flat.numel() else self._chunks.place(index)
            parts[rank] = tensor[at + first : at + end]
        fold(parts, self._reduction, own)
        self._sums[self._chunks.place(index) :][: end - first].copy_(own)

    def _gather_chunk(self, index: int) -> None:
        if index not in self._chunks:
            return
        start, slices = self._chunks.slices(index)
        at = self._chunks.place(index)
        for rank, tensor in self._others_sums.items():
            first, end = slices[rank]
            if end > first:
                self._flat[start + first : start + end].copy_(tensor[at : at + end - first])
