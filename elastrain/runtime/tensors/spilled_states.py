"""Shard states on the drives of this member: the disk of its snapshot store, over devices of `elastrain.offload`.

In a job on a device, a tier of host memory may lie above the drives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastrain.device.port import DevicePort
from elastrain.device.same_memory import HOST
from elastrain.errors import DriveFailedError
from elastrain.offload.drives.device import ALIGN_BYTES, Copy, Device, NoSpaceError
from elastrain.offload.drives.host_buffers import lease
from elastrain.offload.errors import CorruptSpillError, OffloadError, SpillReadError, SpillWriteError
from elastrain.snapshot.store import Stored

Likes = Sequence[tuple[torch.dtype, int]]
"""The dtype and number of elements of each tensor."""


@dataclass(frozen=True, kw_only=True)
class SpilledState:
    """A state on a device. Its tensors lie one after the other at multiples of `ALIGN_BYTES`."""

    device: Device
    copy: Copy
    likes: Likes

    @property
    def size_bytes(self) -> int:
        """Bytes of the state on the device."""
        return self.copy.size_bytes


class StateSpill:
    """The disk of a snapshot store. It writes each state to the drive with the fewest bytes. Used by one thread.

    Raises DriveFailedError if a drive does not take a state, or returns other bytes.

    Args:
        drives: Drives, and no tier.
        port: Device on which the states that are read are used. All copies are waited for.
        tier: Host memory that is filled before the drives.
    """

    def __init__(self, drives: Sequence[Device], *, port: DevicePort = HOST, tier: Device | None = None) -> None:
        self._drives = drives
        self._port = port
        self._tier = tier

    def write(self, shard: int, tensors: Sequence[Tensor]) -> SpilledState:
        """Write the tensors of a state, one after the other."""
        likes = tuple((tensor.dtype, tensor.numel()) for tensor in tensors)
        size_bytes = sum(_round_up(dtype.itemsize * numel) for dtype, numel in likes)
        stored = self._in_tier(tensors, likes, max(1, size_bytes))
        if stored is not None:
            return stored
        device = min(self._drives, key=lambda each: each.used_bytes)
        try:
            return _through_host(device, tensors, likes, max(1, size_bytes))
        except SpillWriteError as fault:
            raise _failed(device, shard, "take", fault) from fault

    def _in_tier(self, tensors: Sequence[Tensor], likes: Likes, size_bytes: int) -> SpilledState | None:
        """Write a state to the tier, and return None if it has no room, but a drive may have."""
        tier = self._tier
        if tier is None or (self._drives and not tier.has_room(size_bytes)):
            return None
        try:
            return _through_host(tier, tensors, likes, size_bytes)
        except NoSpaceError as full:  # its free memory may lie in several places
            if self._drives:
                return None
            raise DriveFailedError(
                f"the host memory for what leaves the device is full ({full}): this member ends, and the other holders "
                "of its shards go on; raise --host-tier, or name a directory (--offload-dir)"
            ) from full

    def read(self, shard: int, stored: Stored) -> list[Tensor]:
        """Return the tensors of a state in new memory."""
        assert isinstance(stored, SpilledState)
        try:
            memory = lease(size_bytes=stored.copy.size_bytes, shift_bytes=stored.copy.shift_bytes)
            stored.device.read(stored.copy, memory.image, lambda: False)
        except SpillReadError as fault:
            raise _failed(stored.device, shard, "give back", fault) from fault
        parts = _parts(memory.storage, stored.likes)
        return parts if self._port.is_host else [part.to(self._port.device) for part in parts]

    def free(self, stored: Stored) -> None:
        """Free the space of a state on its device."""
        assert isinstance(stored, SpilledState)
        stored.device.free(stored.copy.slot)


def _is_far(tensors: Sequence[Tensor]) -> bool:
    """Return True if a state lies on a device. Its step counts may lie in host memory all the same."""
    return any(tensor.device.type != "cpu" for tensor in tensors)


def _through_host(device: Device, tensors: Sequence[Tensor], likes: Likes, size_bytes: int) -> SpilledState:
    """Write the tensors from host memory, to which they are copied first. Raises SpillWriteError."""
    memory = lease(size_bytes=size_bytes, shift_bytes=0)
    for part, tensor in zip(_parts(memory.storage, likes), tensors, strict=True):
        part.copy_(tensor)
    image = memory.image[: memory.storage.nbytes()]
    copy = device.write(image, 0, lambda: False, is_copied=_is_far(tensors))
    return SpilledState(device=device, copy=copy, likes=likes)


def _failed(device: Device, shard: int, what: str, fault: OffloadError) -> DriveFailedError:
    why = (
        "other bytes came back than were written" if isinstance(fault, CorruptSpillError) else fault.__cause__ or fault
    )
    return DriveFailedError(
        f"{device.engine.name} does not {what} the optimizer state of shard {shard} ({why}): this member ends, and the "
        "shard's other holders go on; look at that drive, or name another directory (--offload-dir)"
    )


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _parts(storage: torch.UntypedStorage, likes: Likes) -> list[Tensor]:
    """Return tensors over the storage, one after the other."""
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    parts, start_bytes = [], 0
    for dtype, numel in likes:
        parts.append(whole[start_bytes : start_bytes + dtype.itemsize * numel].view(dtype))
        start_bytes += _round_up(dtype.itemsize * numel)
    return parts
