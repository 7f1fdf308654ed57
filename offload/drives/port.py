"""The port to a device: methods that every engine has. One contract suite runs against all engines.

An engine moves bytes and reports the result. It never decides what goes where, and knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

# Offsets, lengths and memory addresses handed to an engine are multiples of this, as direct I/O requires everywhere.
PAGE_BYTES = 4096
OWN_COPIES = "our own pinned copies"
"""Way of a device's bytes to an engine of the host: copies through pinned host memory, if the device can pin any."""
HOST_IO = "the host's own I/O"
"""Way of bytes that lie in host memory anyway."""


class IoEngine(Protocol):
    """A linear space of bytes that disappears with its process, however the process ends.

    `views` are contiguous, page-aligned in address and length, and writable for `read`. Calls for disjoint ranges may
    run at the same time in several threads. A call returns when it is done. Every method but `close` may raise
    `OSError`.
    """

    name: str

    def reserve(self, size_bytes: int) -> None:
        """Make `[0, size_bytes)` usable. Raises `OSError(ENOSPC)` if the device has no room for it."""

    def write(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        """Write all bytes of `views`, one after the other, at `offset_bytes`."""

    def read(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        """Fill `views`, one after the other, from `offset_bytes`."""

    def capacity_bytes(self) -> int:
        """Return the size of the whole device, for the computation of wear; 0 if it does not wear out."""

    def close(self) -> None:
        """Free everything. Never raises; may be called twice."""


@runtime_checkable
class AddressableEngine(Protocol):
    """An engine whose bytes lie in this process's memory, so that a CUDA device copies to it directly."""

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return a view of the engine's bytes. Raises `OSError`."""


@runtime_checkable
class CudaEngine(Protocol):
    """An engine that also moves CUDA memory without a copy of ours in host memory. The methods may raise `OSError`."""

    moved_by: str
    """The way that the bytes go, for people."""

    def write_cuda(self, offset_bytes: int, memory: torch.Tensor) -> None:
        """Write a contiguous CUDA tensor of bytes."""

    def read_cuda(self, offset_bytes: int, memory: torch.Tensor) -> None:
        """Fill a contiguous CUDA tensor of bytes."""


def round_up(size_bytes: int) -> int:
    """Return the smallest multiple of `PAGE_BYTES` that is at least `size_bytes`."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
