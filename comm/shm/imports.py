"""Peers' tensors in shared memory, read here in place: their segments, mapped read-only, and what goes back to them.

Nothing here knows of sockets: descriptors and references come from outside, and the tokens to return are asked for.
"""

from __future__ import annotations

import collections
import math
import time
import weakref
from dataclasses import dataclass

import torch

from elastrain.comm.errors import ProtocolError
from elastrain.comm.shm.shared_memory import Mapping, open_sealed

_RETURN_AT_COUNT = 32
_RETURN_AFTER_S = 0.05  # references are given back in lumps: each frame wakes a process


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A tensor that lies in a shared segment of the sender's; `token` is what the receiver gives back when done."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    segment: int
    offset_bytes: int
    token: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Imports:
    """One peer's segments, mapped read-only, and the references to be given back to it."""

    def __init__(self) -> None:
        self._mappings: dict[int, Mapping] = {}
        self._wholes: dict[int, torch.Tensor] = {}
        # Tokens of references that nothing here refers to any more: filled by finalizers, which run in any thread.
        self.returned: collections.deque[int] = collections.deque()
        self._taken_s = time.monotonic()

    def add(self, number: int, fd: int, size_bytes: int) -> None:
        """Map a segment; the caller closes `fd`. Raises ProtocolError, OutOfMemory."""
        if number in self._mappings:
            raise ProtocolError(f"segment {number} was passed twice")
        self._mappings[number] = open_sealed(fd, size_bytes)

    def drop(self, number: int) -> None:
        """The mapping itself lives on while a tensor refers to it."""
        self._mappings.pop(number, None)
        self._wholes.pop(number, None)

    def whole(self, number: int) -> torch.Tensor | None:
        """All bytes of a segment, read-only as in `tensor`; None where it was not passed, or is gone. Any thread."""
        found = self._wholes.get(number)
        mapping = self._mappings.get(number)
        if found is None and mapping is not None:
            view = mapping.view(0, mapping.size_bytes)
            found = torch.frombuffer(view, dtype=torch.uint8)
            weakref.finalize(view, _let_go, mapping).atexit = False
            self._wholes[number] = found
        return found

    def tensor(self, reference: Reference) -> torch.Tensor:
        """A read-only view of the sender's memory; valid as long as it is referred to, also when the sender is dead.

        Writing to it ends the process (SIGSEGV): the mapping is read-only. Raises ProtocolError.
        """
        mapping = self._mappings.get(reference.segment)
        if mapping is None:
            raise ProtocolError(f"a reference into segment {reference.segment}, which was not passed")
        size_bytes, end_bytes = reference.size_bytes, reference.offset_bytes + reference.size_bytes
        if size_bytes == 0 or end_bytes > mapping.size_bytes or reference.offset_bytes % reference.dtype.itemsize:
            raise ProtocolError(f"a reference to bytes {reference.offset_bytes} to {end_bytes} of {mapping.size_bytes}")
        view = mapping.view(reference.offset_bytes, size_bytes)
        flat = torch.frombuffer(view, dtype=reference.dtype)
        # The mapping is an argument only to be kept alive for as long as the view is.
        weakref.finalize(view, _give_back, self.returned, reference.token, mapping).atexit = False
        return flat.view(reference.shape)

    def take_returned(self) -> list[int]:
        """Tokens of the references that nothing here refers to any more, since the last call."""
        tokens: list[int] = []
        while self.returned:
            tokens.append(self.returned.popleft())
        if tokens:
            self._taken_s = time.monotonic()
        return tokens

    def return_due_s(self) -> float:
        """When `take_returned` should be called at the latest, in time.monotonic(); inf: nothing waits."""
        count = len(self.returned)
        if not count:
            return math.inf
        return 0.0 if count >= _RETURN_AT_COUNT else self._taken_s + _RETURN_AFTER_S


def _let_go(_mapping: Mapping) -> None:
    """Its argument was kept alive so far."""


def _give_back(returned: collections.deque[int], token: int, _mapping: Mapping) -> None:
    returned.append(token)
