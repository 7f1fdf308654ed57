"""Kinds of memory that segments lie in, and the kind of host memory. No sockets."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from elastrain.comm.shm.shared_memory import HUGE_PAGE_BYTES, Mapping, create_sealed, reserve, use_huge_pages

_IDLE_SEGMENTS = 4
"""Empty segments in host memory are kept up to so many times the ordinary size."""


class SegmentKind(Protocol):
    """The memory that segments lie in: how it is made, and how tensors lie in it."""

    page_bytes: int
    """Sizes of segments are multiples of it."""
    run_bytes: int
    """Tensors of so many bytes begin at a multiple of it. 0: they may begin anywhere."""
    idle_bytes: float
    """Empty segments are kept up to this size."""
    first_number: int
    """Number of the first segment. Readers tell by it which kind a segment is of."""

    def create(self, size_bytes: int) -> tuple[int, Any]:
        """Return a descriptor that peers can map, and the mapping. Raises OutOfMemory."""
        ...

    def reserve(self, fd: int, mapping: Any, start: int, stop: int) -> None:
        """Allocate the pages from `start` to `stop` now. Raises OutOfMemory."""

    def tensor(self, mapping: Any, offset_bytes: int, numel: int, dtype: torch.dtype) -> tuple[object, torch.Tensor]:
        """Return a 1-D tensor over bytes of the mapping, and an object that lives as long as its storage."""
        ...


class HostSegments:
    """Segments in sealed memfds."""

    page_bytes = 4096
    first_number = 1

    def __init__(self, segment_bytes: int, *, huge_pages: bool) -> None:
        self._huge_pages = huge_pages
        self.run_bytes = HUGE_PAGE_BYTES if huge_pages else 0
        self.idle_bytes: float = _IDLE_SEGMENTS * segment_bytes

    def create(self, size_bytes: int) -> tuple[int, Mapping]:
        """See `SegmentKind.create`."""
        return create_sealed("elastrain-segment", size_bytes)

    def reserve(self, fd: int, mapping: Mapping, start: int, stop: int) -> None:
        """See `SegmentKind.reserve`."""
        reserve(fd, start, stop - start)
        if self._huge_pages:
            use_huge_pages(mapping.address + start, stop - start)

    def tensor(
        self, mapping: Mapping, offset_bytes: int, numel: int, dtype: torch.dtype
    ) -> tuple[object, torch.Tensor]:
        """See `SegmentKind.tensor`."""
        view = mapping.view(offset_bytes, numel * dtype.itemsize)
        return view, torch.frombuffer(view, dtype=dtype)
