"""Buffers in shared memory that come back. Nothing of steps or shards is known here."""

from __future__ import annotations

import torch
from torch import Tensor

from elastrain.runtime.model import Allocate, allocated


class Buffers:
    """Shared-memory buffers that come back: the same few sizes are needed in every step."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self.made_bytes = 0
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._lent: dict[int, Tensor] = {}

    def take(self, like: Tensor) -> Tensor:
        free = self._free.get((like.numel(), like.dtype))
        buffer = free.pop() if free else self._make(like)
        self._lent[id(buffer)] = buffer
        return buffer

    def _make(self, like: Tensor) -> Tensor:
        self.made_bytes += like.nbytes
        return allocated(self._allocate, like.numel(), like.dtype)

    def give_back(self, buffer: Tensor) -> None:
        """A tensor that was not taken here is left alone."""
        if self._lent.pop(id(buffer), None) is not None:
            self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def owns(self, tensor: Tensor) -> bool:
        return id(tensor) in self._lent
