"""Tensors in this process's shared memory: sealed segments, and the regions of them that peers still read.

A region is reused only after its owner has freed it *and* no reader holds it. A receiver gives a reference back when
its last view of the tensor is gone (see `imports`). Segments lie in host memory here, and in the memory of a device in
`device_segments`. No sockets.
"""

from __future__ import annotations

import bisect
import collections
import math
import os
import threading
import weakref
from dataclasses import dataclass, field

import torch

from elastrain.base.arithmetic import FreeRanges
from elastrain.comm.errors import OutOfMemory
from elastrain.comm.shm.segment_kinds import HostSegments, SegmentKind
from elastrain.comm.shm.shared_memory import Pin

ALIGNMENT_BYTES = 64
_TOUCHED_IN_PART_BYTES = (
    1 << 20
)  # a larger scratch tensor is often touched in part only, so its pages are allocated one by one


class Segment:
    """A piece of shared memory of this process. A dedicated segment holds one large tensor at a time."""

    def __init__(self, number: int, size_bytes: int, kind: SegmentKind, *, dedicated: bool) -> None:
        self.number = number
        self.dedicated = dedicated
        self._kind = kind
        self.fd, self.mapping = kind.create(size_bytes)
        self.free = FreeRanges(size_bytes)
        self._touched_bytes = 0  # above this offset nothing was ever used: a fresh memfd is zero there
        self._reserved_bytes = 0  # below this offset all pages are allocated
        self.idle_since = 0  # counted in frees: the segment that is empty for longest is dropped first
        self.regions: dict[int, Region] = {}  # by offset

    def pin(self, pin: Pin) -> None:
        """Allocate all pages of the segment and pin them. Raises OutOfMemory."""
        self._reserve(0, self.mapping.size_bytes)
        self.mapping.pin(pin, read_only=False)

    def take(self, size_bytes: int, *, whole: bool) -> tuple[int, bool] | None:
        """Return `(offset, dirty)` of a free run of bytes, or None; `dirty` if it may have been used before.

        With `whole`, all pages of the run are allocated now, as huge pages where possible. Raises OutOfMemory.
        """
        run_bytes = self._kind.run_bytes
        offset_bytes = self.free.take(size_bytes, run_bytes if 0 < run_bytes <= size_bytes else 1)
        if offset_bytes is None:
            return None
        if whole:
            try:
                self._reserve(offset_bytes, offset_bytes + size_bytes)
            except OutOfMemory:
                self.free.give(offset_bytes, offset_bytes + size_bytes)
                raise
        dirty = offset_bytes < self._touched_bytes
        self._touched_bytes = max(self._touched_bytes, offset_bytes + size_bytes)
        return offset_bytes, dirty

    def _reserve(self, start: int, stop: int) -> None:
        if stop > self._reserved_bytes:
            start = max(start, self._reserved_bytes)
            self._kind.reserve(self.fd, self.mapping, start, stop)
            if start == self._reserved_bytes:
                self._reserved_bytes = stop


@dataclass(kw_only=True, eq=False)
class Region:
    """A piece of a segment that holds one tensor."""

    segment: Segment
    offset_bytes: int
    size_bytes: int
    readers: int = 0
    freed: bool = False


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
    """The place of a tensor in this process's shared memory."""

    region: Region
    offset_bytes: int  # in the segment


@dataclass(kw_only=True)
class _SegmentIndex:
    """Segments ordered by base address, to find the one in which a tensor lies."""

    addresses: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    by_age: list[Segment] = field(default_factory=list)  # without dedicated segments, the oldest first


class SharedMemory:
    """All segments of one kind of this process. Safe to use from several threads.

    Some empty segments are kept, because fresh memory costs far more than a copy.
    """

    def __init__(self, segment_bytes: int, *, huge_pages: bool = True, kind: SegmentKind | None = None) -> None:
        """`kind`: the memory of the segments; None: memfds."""
        self._segment_bytes = segment_bytes
        self._kind = kind or HostSegments(segment_bytes, huge_pages=huge_pages)
        self.pin: Pin | None = None
        """Pins each new segment, so that a device copies faster from and to it."""
        self._frees = 0
        self._lock = threading.Lock()
        self._index = _SegmentIndex()
        self._next_number = self._kind.first_number
        # Regions whose tensors were collected. Finalizers fill this in any thread; they must not take the lock.
        self._collected: collections.deque[Region] = collections.deque()
        self._gone: collections.deque[int] = collections.deque()

    def empty(self, numel: int, dtype: torch.dtype, *, zero: bool = True) -> torch.Tensor:
        """Return a 1-D tensor in a sealed segment, 64-byte aligned. Safe from any thread.

        The memory is free again when the tensor and all its views are collected, or `free` was called, and every reader
        has given its reference back. Raises ValueError if `numel` is not positive, and OutOfMemory.

        Args:
            numel: Number of elements.
            dtype: Type of the elements.
            zero: Fill the tensor with zeros; False leaves any content in it.
        """
        if numel < 1:
            raise ValueError(f"a shared tensor has at least one element; got {numel}")
        size_bytes = math.ceil(numel * dtype.itemsize / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        with self._lock:
            self._free_collected()
            region, dirty = self._take(size_bytes, whole=zero or size_bytes <= _TOUCHED_IN_PART_BYTES)
        living, tensor = self._kind.tensor(region.segment.mapping, region.offset_bytes, numel, dtype)
        if dirty and zero:
            tensor.zero_()
        # The registry of finalizers keeps region and mapping alive as long as the tensor's storage lives.
        weakref.finalize(living, self._collected.append, region).atexit = False
        return tensor

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor as `empty` does, with any content."""
        return self.empty(numel, dtype, zero=False)

    def _take(self, size_bytes: int, *, whole: bool) -> tuple[Region, bool]:
        dedicated = size_bytes > self._segment_bytes // 2
        # The oldest first: its pages are allocated, and younger segments become empty, so that they can be dropped.
        fitting = self._idle_dedicated(size_bytes) if dedicated else self._index.by_age
        for segment in fitting:
            taken = segment.take(size_bytes, whole=whole)
            if taken is not None:
                return self._place(segment, taken[0], size_bytes), taken[1]
        wanted_bytes = size_bytes if dedicated else self._segment_bytes
        page_bytes = self._kind.page_bytes
        segment = self._new_segment(math.ceil(wanted_bytes / page_bytes) * page_bytes, dedicated=dedicated)
        taken = segment.take(size_bytes, whole=whole)
        assert taken is not None
        return self._place(segment, taken[0], size_bytes), False

    def _idle_dedicated(self, size_bytes: int) -> list[Segment]:
        """Return the empty dedicated segments of at most twice this size, the smallest first."""
        idle = [
            s
            for s in self._index.segments
            if s.dedicated and s.free.all_free and s.mapping.size_bytes <= 2 * size_bytes
        ]
        return sorted(idle, key=lambda segment: segment.mapping.size_bytes)

    def _new_segment(self, size_bytes: int, *, dedicated: bool) -> Segment:
        segment = Segment(self._next_number, size_bytes, self._kind, dedicated=dedicated)
        self._next_number += 1
        index = bisect.bisect(self._index.addresses, segment.mapping.address)
        self._index.addresses.insert(index, segment.mapping.address)
        self._index.segments.insert(index, segment)
        if not dedicated:
            self._index.by_age.append(segment)
        if self.pin is not None:
            segment.pin(self.pin)
        return segment

    @staticmethod
    def _place(segment: Segment, offset_bytes: int, size_bytes: int) -> Region:
        region = Region(segment=segment, offset_bytes=offset_bytes, size_bytes=size_bytes)
        segment.regions[offset_bytes] = region
        return region

    def find(self, tensor: torch.Tensor) -> TensorPlace | None:
        """Return the place of this contiguous tensor, or of a view of one; None if it lies in no segment."""
        address = tensor.data_ptr()
        with self._lock:
            index = bisect.bisect(self._index.addresses, address) - 1
            if index < 0:
                return None
            segment = self._index.segments[index]
            offset_bytes = address - segment.mapping.address
            if offset_bytes >= segment.mapping.size_bytes:
                return None
            region = segment.regions.get(offset_bytes) or self._around(segment, offset_bytes)
        if region is None or offset_bytes + tensor.nbytes > region.offset_bytes + region.size_bytes:
            return None
        return TensorPlace(region=region, offset_bytes=offset_bytes)

    @staticmethod
    def _around(segment: Segment, offset_bytes: int) -> Region | None:
        start = max((at for at in segment.regions if at < offset_bytes), default=None)
        return None if start is None else segment.regions[start]

    def hold(self, region: Region) -> None:
        """Count one more reader: the region is not reused before the matching `release`."""
        with self._lock:
            region.readers += 1

    def release(self, region: Region) -> None:
        """Count one reader less; the region is reused if it was freed and this was the last reader."""
        with self._lock:
            region.readers -= 1
            self._reuse(region)

    def free(self, tensor: torch.Tensor) -> None:
        """Free a tensor of `empty` now; it must not be touched afterwards.

        Raises ValueError for a tensor that is not of `empty`, or only a part of one.
        """
        place = self.find(tensor)
        if place is None or place.offset_bytes != place.region.offset_bytes:
            raise ValueError("only a tensor that came from empty(), not a part of one, can be freed")
        with self._lock:
            self._free(place.region)

    def _free(self, region: Region) -> None:
        if not region.freed:
            region.freed = True
            self._reuse(region)

    def _free_collected(self) -> None:
        while self._collected:
            self._free(self._collected.popleft())

    def _reuse(self, region: Region) -> None:
        segment = region.segment
        if not region.freed or region.readers or segment.regions.get(region.offset_bytes) is not region:
            return
        del segment.regions[region.offset_bytes]
        segment.free.give(region.offset_bytes, region.offset_bytes + region.size_bytes)
        self._frees += 1
        segment.idle_since = self._frees
        idle = sorted((s for s in self._index.segments if s.free.all_free), key=lambda segment: segment.idle_since)
        idle_bytes = sum(segment.mapping.size_bytes for segment in idle)
        for segment in idle:
            if idle_bytes > self._kind.idle_bytes:
                idle_bytes -= segment.mapping.size_bytes
                self._drop(segment)

    def trim(self) -> None:
        """Return empty segments to the kernel, if the freed memory is not needed again soon."""
        with self._lock:
            self._free_collected()
            for segment in [s for s in self._index.segments if s.free.all_free]:
                self._drop(segment)

    def _drop(self, segment: Segment) -> None:
        index = self._index.segments.index(segment)
        del self._index.segments[index], self._index.addresses[index]
        if not segment.dedicated:
            self._index.by_age.remove(segment)
        os.close(segment.fd)
        self._gone.append(segment.number)

    def take_gone(self) -> list[int]:
        """Return the numbers of segments removed since the last call, whose mappings peers should drop."""
        with self._lock:
            self._free_collected()
            gone = list(self._gone)
            self._gone.clear()
        return gone

    def resident_bytes(self) -> int:
        """Return the bytes that the kernel holds for the segments. A page stays once it was touched."""
        return sum(os.fstat(segment.fd).st_blocks * 512 for segment in self.segments())

    def segments(self) -> tuple[Segment, ...]:
        """Return the segments that exist now."""
        with self._lock:
            return tuple(self._index.segments)

    def close(self) -> None:
        """Close all descriptors. Existing tensors stay valid. Takes no lock, because forked children call it."""
        for segment in self._index.segments:
            os.close(segment.fd)
        self._index = _SegmentIndex()
