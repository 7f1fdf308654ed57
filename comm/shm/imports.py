"""Segments of a peer's shared memory, mapped read-only, and the references to be given back to the peer.

No sockets: the caller passes descriptors and references in, and asks for the tokens to return.
"""

from __future__ import annotations

import collections
import functools
import math
import time
import weakref
from dataclasses import dataclass

import torch

from elastrain.comm.errors import ProtocolError
from elastrain.comm.shm.device_segments import DeviceShare, adopted, is_on_device
from elastrain.comm.shm.shared_memory import Mapping, Pin, open_sealed
from elastrain.device.device_sharing import DeviceMapping

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

    def __init__(self, pin: Pin | None = None, share: DeviceShare | None = None) -> None:
        """`pin`: pins each mapping, which is read-only, so that a device copies faster from it.

        `share`: maps segments in device memory. None: this process reads none.
        """
        self.pin, self.share = pin, share
        self._mappings: dict[int, Mapping] = {}
        self._on_device: dict[int, DeviceMapping] = {}
        self._wholes: dict[int, torch.Tensor] = {}
        # Tokens of references whose tensors were collected. Finalizers fill this, in any thread.
        self.returned: collections.deque[int] = collections.deque()
        self._taken_s = time.monotonic()

    def add(self, number: int, fd: int, size_bytes: int) -> None:
        """Map a segment. The caller closes `fd`. Raises ProtocolError, OutOfMemory."""
        if number in self._mappings or number in self._on_device:
            raise ProtocolError(f"segment {number} was passed twice")
        if is_on_device(number):
            self._on_device[number] = self._share_of(number).open(fd, size_bytes)
            return
        mapping = self._mappings[number] = open_sealed(fd, size_bytes)
        if self.pin is not None:
            mapping.pin(self.pin, read_only=True)

    def drop(self, number: int) -> None:
        """Forget a segment. Its mapping lives on while a tensor refers to it."""
        self._mappings.pop(number, None)
        self._on_device.pop(number, None)
        self._wholes.pop(number, None)

    def _share_of(self, number: int) -> DeviceShare:
        if self.share is None:
            raise ProtocolError(f"segment {number} lies in device memory, which this process does not read")
        return self.share

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

        The mapping is read-only: writing to the tensor ends the process (SIGSEGV). A tensor in device memory has to be
        kept until all work that reads it has landed. Raises ProtocolError if the reference lies outside the peer's
        segments.
        """
        mapping = self._mappings.get(reference.segment)
        mapped = self._on_device.get(reference.segment) if mapping is None else mapping
        if mapped is None:
            raise ProtocolError(f"a reference into segment {reference.segment}, which was not passed")
        size_bytes, end_bytes = reference.size_bytes, reference.offset_bytes + reference.size_bytes
        if size_bytes == 0 or end_bytes > mapped.size_bytes or reference.offset_bytes % reference.dtype.itemsize:
            raise ProtocolError(f"a reference to bytes {reference.offset_bytes} to {end_bytes} of {mapped.size_bytes}")
        if mapping is None:
            return self._adopted(reference)
        view = mapping.view(reference.offset_bytes, size_bytes)
        flat = torch.frombuffer(view, dtype=reference.dtype)
        # The mapping is an argument only to be kept alive for as long as the view is.
        weakref.finalize(view, _give_back, self.returned, reference.token, mapping).atexit = False
        return flat.view(reference.shape)

    def _adopted(self, reference: Reference) -> torch.Tensor:
        gone = functools.partial(self.returned.append, reference.token)
        flat = adopted(self._on_device[reference.segment], reference.offset_bytes, reference.size_bytes, gone)
        return flat.view(reference.dtype).view(reference.shape)

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
