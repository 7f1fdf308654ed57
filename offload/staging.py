"""A bounded pool of host memory through which device memory passes: pinned pages are slow to get and hinder others.

Buffers are whole pages, kept for the next one who needs as much. Whoever finds the pool lent out waits for a buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from elastrain.offload.engines.port import round_up

Allocate = Callable[[int], torch.Tensor]


class StagingPool:
    """Lends buffers of at most `capacity_bytes` together; one that is larger than that is lent alone. Any thread.

    `allocate` gives page-aligned bytes; `held_bytes` are what was allocated and not let go of.
    """

    def __init__(self, capacity_bytes: int, allocate: Allocate) -> None:
        self.held_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._allocate = allocate
        self._idle: list[torch.Tensor] = []
        self._lent_bytes = 0
        self._returned = threading.Condition()

    @contextmanager
    def lend(self, size_bytes: int) -> Iterator[torch.Tensor]:
        """At least so many bytes for the time of a `with`; waits for them."""
        buffer = self._take(round_up(size_bytes))
        try:
            yield buffer
        finally:
            with self._returned:
                self._lent_bytes -= buffer.nbytes
                self._idle.append(buffer)
                self._returned.notify_all()

    def _take(self, size_bytes: int) -> torch.Tensor:
        with self._returned:
            while self._lent_bytes and self._lent_bytes + size_bytes > self._capacity_bytes:
                self._returned.wait()
            fitting = [each for each in self._idle if each.nbytes >= size_bytes]
            buffer = min(fitting, key=lambda each: each.nbytes, default=None)
            if buffer is None or (self._lent_bytes and self._lent_bytes + buffer.nbytes > self._capacity_bytes):
                self._let_go(size_bytes)
                buffer = self._allocate(size_bytes)
                self.held_bytes += buffer.nbytes
            else:
                self._idle = [each for each in self._idle if each is not buffer]
            self._lent_bytes += buffer.nbytes
            return buffer

    def _let_go(self, wanted_bytes: int) -> None:
        """Give idle buffers up until there is room for a new one; the smallest first, which serve the fewest."""
        self._idle.sort(key=lambda each: -each.nbytes)
        while self._idle and self.held_bytes + wanted_bytes > self._capacity_bytes:
            self.held_bytes -= self._idle.pop().nbytes
