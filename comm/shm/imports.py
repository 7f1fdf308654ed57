"""Segments of a peer's shared memory, mapped read-only, and the references to be given back to the peer.

No sockets: the caller passes descriptors and references in, and asks for the tokens to return.
"""

from __future__ import annotations

import collections
import math
import time
import weakref
from dataclasses import dataclass

import torch

from elastrain.comm.errors import ProtocolError
from elastrain.comm.shm.shared_memory import Mapping, Pin, open_sealed

_RETURN_AT_COUNT = 32
_RETURN_AFTER_S = 0.05  # references are given back in batches, because each frame wakes a process


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A tensor in a shared segment of the sender. The receiver gives `token` back when it is done with the tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    segment: int
    offset_bytes: int
    token: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Imports:
    """One peer's segments, mapped read-only, and the references to be given back to that peer."""

    def __init__(self, pin: Pin | None = None) -> None:
        """`pin`: pins each mapping, which is read-only, so that a device copies faster from it."""
        self.pin = pin
        self._mappings: dict[int, Mapping] = {}
        self._wholes: dict[int, torch.Tensor] = {}
        # Tokens of references whose tensors were collected. Finalizers fill this, in any thread.
        self.returned: collections.deque[int] = collections.deque()
        self._taken_s = time.monotonic()

    def add(self, number: int, fd: int, size_bytes: int) -> None:
        """Map a segment. The caller closes `fd`. Raises ProtocolError, OutOfMemory."""
        if number in self._mappings:
            raise ProtocolError(f"segment {number} was passed twice")
        mapping = self._mappings[number] = open_sealed(fd, size_bytes)
        if self.pin is not None:
            mapping.pin(self.pin, read_only=True)

    def drop(self, number: int) -> None:
        """Forget a segment. Its mapping lives on while a tensor refers to it."""
        self._mappings.pop(number, None)
        self._wholes.pop(number, None)

    def whole(self, number: int) -> torch.Tensor | None:
        """Return all bytes of a segment, or None if it was not passed or is gone. Any thread may call this.

        Writing to them ends the process, as for `tensor`.
        """
        found = self._wholes.get(number)
        mapping = self._mappings.get(number)
        if found is None and mapping is not None:
            view = mapping.view(0, mapping.size_bytes)
            found = torch.frombuffer(view, dtype=torch.uint8)
            weakref.finalize(view, _let_go, mapping).atexit = False
            self._wholes[number] = found
        return found

    def tensor(self, reference: Reference) -> torch.Tensor:
        """Return a view of the sender's memory, without a copy. It stays valid even after the sender's death.

        The mapping is read-only: writing to the tensor ends the process (SIGSEGV). Raises ProtocolError if the
        reference lies outside the peer's segments.
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
        """Return the tokens of all references whose tensors were collected since the last call."""
        tokens: list[int] = []
        while self.returned:
            tokens.append(self.returned.popleft())
        if tokens:
            self._taken_s = time.monotonic()
        return tokens

    def return_due_s(self) -> float:
        """Return the time.monotonic() by which `take_returned` should be called; inf if no token waits."""
        count = len(self.returned)
        if not count:
            return math.inf
        return 0.0 if count >= _RETURN_AT_COUNT else self._taken_s + _RETURN_AFTER_S


def _let_go(_mapping: Mapping) -> None:
    """Do nothing. As an argument of a finalizer, the mapping was kept alive until now."""


def _give_back(returned: collections.deque[int], token: int, _mapping: Mapping) -> None:
    returned.append(token)
