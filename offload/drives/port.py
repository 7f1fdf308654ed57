"""The port to a device: five methods, the same for every engine. One contract suite runs against all of them.

An engine moves bytes and reports how it went. It never decides what goes where, and knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

# Offsets, lengths and memory addresses handed to an engine are multiples of this: what direct I/O asks for everywhere.
PAGE_BYTES = 4096


class IoEngine(Protocol):
    """A linear space of bytes that is gone when the process is gone, however it ends.

    `views` are contiguous, writable for `read`, and page-aligned in address and length. Calls for disjoint ranges may
    run at the same time from several threads; a call returns when it is done. Every method raises `OSError`.
    """

    name: str

    def reserve(self, size_bytes: int) -> None:
        """Make `[0, size_bytes)` usable. Raises `OSError(ENOSPC)` where the device has no room for it."""

    def write(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        """Write all bytes of `views`, one after the other, at `offset_bytes`."""

    def read(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        """Fill `views`, one after the other, from `offset_bytes`."""

    def capacity_bytes(self) -> int:
        """How much the whole device holds, for wear; 0 where that has no meaning."""

    def close(self) -> None:
        """Give everything back. Never raises; may be called twice."""


@runtime_checkable
class AddressableEngine(Protocol):
    """What an engine also has whose bytes lie in this process's memory: a device copies there without a way round."""

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """The bytes themselves. Raises `OSError`."""


@runtime_checkable
class CudaEngine(Protocol):
    """What an engine also has that moves CUDA memory without a copy in host memory. Both raise `OSError`."""

    def write_cuda(self, offset_bytes: int, memory: torch.Tensor) -> None:
        """Write a contiguous CUDA tensor of bytes."""

    def read_cuda(self, offset_bytes: int, memory: torch.Tensor) -> None:
        """Fill a contiguous CUDA tensor of bytes."""


def round_up(size_bytes: int) -> int:
    """The smallest multiple of `PAGE_BYTES` that is not below `size_bytes`."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
