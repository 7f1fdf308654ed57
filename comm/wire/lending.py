"""Keeps what one peer was given of my shared memory: segments that it can map, regions that it still reads."""

from __future__ import annotations

import torch

from elastrain.comm.errors import ProtocolError
from elastrain.comm.shm.imports import Reference
from elastrain.comm.shm.segments import Region, SharedMemory, TensorPlace


class Lending:
    """Regions lent to one peer, by token. A region is not used again before its token came back, or all were taken."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self._passed: set[int] = set()  # numbers of segments whose descriptors the peer has
        self._lent: dict[int, Region] = {}
        self._next_token = 1

    @property
    def lent(self) -> int:
        """How many references the peer holds."""
        return len(self._lent)

    def pass_segment(self, number: int) -> bool:
        """Note that the peer gets this segment; False if it has it already."""
        if number in self._passed:
            return False
        self._passed.add(number)
        return True

    def withdraw_segment(self, number: int) -> bool:
        """Note that this segment exists no more; False if the peer never had it."""
        if number not in self._passed:
            return False
        self._passed.discard(number)
        return True

    def lend(self, tensor: torch.Tensor, place: TensorPlace) -> Reference:
        token, self._next_token = self._next_token, self._next_token + 1
        self.memory.hold(place.region)
        self._lent[token] = place.region
        return Reference(
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            segment=place.region.segment.number,
            offset_bytes=place.offset_bytes,
            token=token,
        )

    def take_back(self, token: int) -> None:
        """Raises ProtocolError for a token that is not lent."""
        region = self._lent.pop(token, None)
        if region is None:
            raise ProtocolError(f"reference {token} was given back, but is not lent")
        self.memory.release(region)

    def take_all_back(self) -> None:
        """The peer has ended, or is in no view of ours any more: what it held is free again."""
        while self._lent:
            self.memory.release(self._lent.popitem()[1])
