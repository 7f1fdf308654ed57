"""Shared segments in the memory of a device, for tensors that peers on this host read in place.

They are lent and given back like segments of host memory. No event crosses processes: the host waits until work has
landed, and only then tells peers about its result, or gives their memory back.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import torch

from elastrain.comm.errors import OutOfMemory, ProtocolError
from elastrain.comm.shm.segments import SharedMemory
from elastrain.device.device_sharing import DeviceMapping, DeviceSharing, SharingError

FIRST_NUMBER = 1 << 31
"""Number of the first segment in device memory. Those of segments in host memory are smaller."""
_RESERVED_SHARE = 16
"""One part of so many of the device's memory is left free, for the allocations of torch."""


def is_on_device(number: int) -> bool:
    """Return True if the segment with this number lies in device memory."""
    return number >= FIRST_NUMBER


class DeviceSegments:
    """Segments in device memory. Empty ones are kept, because each step needs the same, until `SharedMemory.trim`."""

    first_number = FIRST_NUMBER
    run_bytes = 0
    idle_bytes = math.inf

    def __init__(self, sharing: DeviceSharing, free_and_total: Callable[[], tuple[int, int]]) -> None:
        """`free_and_total`: returns the free bytes of the device, and all bytes that it has."""
        self.page_bytes = sharing.page_bytes
        self._sharing, self._free_and_total = sharing, free_and_total

    def create(self, size_bytes: int) -> tuple[int, DeviceMapping]:
        """See `SegmentKind.create`. Raises OutOfMemory, too, if a part of the device would not stay free."""
        free_bytes, total_bytes = self._free_and_total()
        if free_bytes - size_bytes < total_bytes // _RESERVED_SHARE:
            raise OutOfMemory(f"the device has {free_bytes} free bytes, too few for a segment of {size_bytes} bytes")
        try:
            return self._sharing.create(size_bytes)
        except SharingError as error:
            raise OutOfMemory(f"a segment of {size_bytes} bytes in device memory could not be had: {error}") from error

    def reserve(self, fd: int, mapping: DeviceMapping, start: int, stop: int) -> None:
        """Do nothing: device memory is there once it was created."""

    def tensor(
        self, mapping: DeviceMapping, offset_bytes: int, numel: int, dtype: torch.dtype
    ) -> tuple[object, torch.Tensor]:
        """See `SegmentKind.tensor`."""
        flat = mapping.bytes_at(offset_bytes, numel * dtype.itemsize)
        return flat.untyped_storage(), flat.view(dtype)


class DeviceShare:
    """The device memory of this process that peers read, and that of peers here.

    `domain`: the name that it has in common with the peers that can read it. `memory`: its segments.
    """

    def __init__(self, sharing: DeviceSharing, domain: str, free_and_total: Callable[[], tuple[int, int]]) -> None:
        self.domain = domain
        self.tell_full: Callable[[int], object] | None = None
        """Is called once, with the bytes of the first tensor for which the device lacks the room. Any thread."""
        self._sharing = sharing
        self.memory = SharedMemory(sharing.segment_bytes, kind=DeviceSegments(sharing, free_and_total))
        self._foreign: weakref.WeakSet[DeviceMapping] = weakref.WeakSet()
        """Mappings of peers' segments that are in use here."""

    def scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor with any content that peers can read, or None if the device lacks the room for it."""
        for trims in (False, True):
            try:
                return self.memory.scratch(numel, dtype)
            except OutOfMemory:
                if not trims:
                    self.memory.trim()
        tell, self.tell_full = self.tell_full, None
        if tell is not None:
            tell(numel * dtype.itemsize)
        return None

    def open(self, fd: int, size_bytes: int) -> DeviceMapping:
        """Map a peer's segment. Raises ProtocolError if that is impossible."""
        try:
            mapping = self._sharing.open(fd, size_bytes)
        except SharingError as error:
            raise ProtocolError(f"a peer's {size_bytes} bytes of device memory cannot be read: {error}") from error
        self._foreign.add(mapping)
        return mapping

    def is_foreign(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor lies in a peer's memory."""
        if tensor.device.type == "cpu" or not tensor.numel():
            return False
        address = tensor.data_ptr()
        return any(0 <= address - each.address < each.size_bytes for each in list(self._foreign))

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor lies in memory of this process that peers can read."""
        return tensor.device.type != "cpu" and tensor.numel() > 0 and self.memory.find(tensor) is not None


def adopted(mapping: DeviceMapping, offset_bytes: int, size_bytes: int, gone: Callable[[], object]) -> torch.Tensor:
    """Return bytes of a peer's segment as a tensor of uint8. `gone` is called once no tensor refers to them."""
    flat = mapping.bytes_at(offset_bytes, size_bytes)
    weakref.finalize(flat.untyped_storage(), _let_go, gone, mapping).atexit = False
    return flat


def _let_go(gone: Callable[[], object], _mapping: DeviceMapping) -> None:
    """Tell that a peer's tensor is gone. The mapping is an argument only to be kept alive until now."""
    gone()
