"""The large all_reduce of members that read each other's memory. No threads, sockets or clocks."""

from __future__ import annotations

import torch

from elastrain.comm.collectives import algorithms
from elastrain.comm.collectives.operations import CHUNK_BYTES, Participant, Reduction, describe
from elastrain.comm.collectives.reducing import fold


class PulledReduce:
    """all_reduce where all members read each other's memory: in chunks that stay in the caches, three stages at once.

    In turn t a rank copies chunk t of its tensor to where the others see it, folds its slice of chunk t - 1 from all
    ranks, and takes the others' sums of chunk t - 2. Of everything there are two places: what is written over in turn
    t was read by the others before they published turn t - 1.

    A tensor in shared memory is read where it lies: nobody reads a chunk of it any more when the sums are there.
    """

    def __init__(self, participant: Participant, description: str, tensor: torch.Tensor, reduction: Reduction) -> None:
        self.description = description
        self._tensor, self._reduction = tensor, reduction
        self._flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
        self.lends = tensor.is_contiguous() and participant.memory.owns(tensor)
        self._rank, self._world = participant.rank, participant.world
        self._chunk = CHUNK_BYTES // tensor.itemsize
        self._chunks = algorithms.chunks(tensor.numel(), self._chunk)
        if participant.stage is None:
            raise ValueError("members that do not read each other's memory have to send their parts")
        places = participant.stage().view(tensor.dtype)
        # Its length tells whether a rank gives its tensor or its stage.
        self._staged_numel = 2 * self._chunk + (64 if tensor.numel() == 2 * self._chunk else 0)
        self._sums, self._stage = places[: 2 * self._chunk], places[2 * self._chunk :][: self._staged_numel]
        self._given = self._flat if self.lends else self._stage
        self._parts: dict[int, torch.Tensor] = {}
        self._others_sums: dict[int, torch.Tensor] = {}
        self.rounds = algorithms.pipeline(
            participant.rank, participant.world, len(self._chunks), given=len(self._given), sums=len(self._sums)
        )

    def offer(self, number: int) -> torch.Tensor:
        self._stage_chunk(number)
        self._fold_chunk(number - 1)
        self._gather_chunk(number - 2)
        return self._sums if number else self._given

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        numels = (len(self._sums),) if number else (self._flat.numel(), self._staged_numel)
        if tensor.dtype != self._flat.dtype or tensor.numel() not in numels:
            raise ValueError(f"{describe(self._flat)} is reduced here, rank {rank} gives {describe(tensor)}")
        (self._others_sums if number else self._parts)[rank] = tensor

    def finish(self, number: int) -> None:
        if number == len(self.rounds) - 1 and not self._tensor.is_contiguous():
            self._tensor.copy_(self._flat.view(self._tensor.shape))

    def _slices(self, index: int) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Where the chunk begins, and the ranks' slices in it."""
        start, stop = self._chunks[index]
        return start, algorithms.cut(stop - start, self._world)

    def _stage_chunk(self, index: int) -> None:
        if self.lends or index >= len(self._chunks):
            return
        start, slices = self._slices(index)
        place = self._stage[index % 2 * self._chunk :]
        mine, last = slices[self._rank], slices[-1][1]
        for first, end in ((0, mine[0]), (mine[1], last)):  # nobody asks for my own slice
            if end > first:
                place[first:end].copy_(self._flat[start + first : start + end])

    def _fold_chunk(self, index: int) -> None:
        if not 0 <= index < len(self._chunks):
            return
        start, slices = self._slices(index)
        first, end = slices[self._rank]
        if end == first:
            return
        own = self._flat[start + first : start + end]
        parts = [own] * self._world
        for rank, tensor in self._parts.items():
            at = start if tensor.numel() == self._flat.numel() else index % 2 * self._chunk
            parts[rank] = tensor[at + first : at + end]
        fold(parts, self._reduction, own)
        self._sums[index % 2 * self._chunk :][: end - first].copy_(own)

    def _gather_chunk(self, index: int) -> None:
        if not 0 <= index < len(self._chunks):
            return
        start, slices = self._slices(index)
        at = index % 2 * self._chunk
        for rank, tensor in self._others_sums.items():
            first, end = slices[rank]
            if end > first:
                self._flat[start + first : start + end].copy_(tensor[at : at + end - first])
