"""Device memory that other processes of the host read in place: what it takes, and which kinds of device have it.

The memory has no name. A descriptor stands for it, which is passed over a UNIX socket, and it lives while any process
has a descriptor or a mapping of it. So peers read the memory of a process that was killed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from importlib import import_module
from typing import Protocol

import torch

from elastrain.device.port import DevicePort


class SharingError(RuntimeError):
    """Device memory that other processes cannot read. What travels is copied through host memory then."""


class DeviceMapping(Protocol):
    """Device memory at an address of this process. It is unmapped when this object is garbage-collected."""

    address: int
    size_bytes: int

    def bytes_at(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """Return these bytes as a tensor of uint8 with a storage of its own, which does not keep the mapping alive."""
        ...


class DeviceSharing(Protocol):
    """The shareable memory of one kind of device, for a process that computes on the device with number `index`."""

    index: int
    identities: tuple[str, ...]
    """A name for each device that this process sees, by number. No other device of any host has it."""
    segment_bytes: int
    """Size of an ordinary segment."""
    page_bytes: int
    """Sizes of mappings are multiples of it."""

    def create(self, size_bytes: int, index: int | None = None) -> tuple[int, DeviceMapping]:
        """Return a descriptor of new memory, and its mapping. The caller closes the descriptor.

        Raises SharingError, also if the device has no memory left.

        Args:
            size_bytes: Size, a multiple of `page_bytes`.
            index: Number of the device that has the memory; None: this process's own one.
        """
        ...

    def open(self, fd: int, size_bytes: int) -> DeviceMapping:
        """Map another process's memory, read-only where the device can. The caller closes the descriptor.

        Raises SharingError.
        """
        ...


PROVIDERS = {"cuda": "elastrain.device.cuda_sharing:CudaSharing"}
"""Torch's name of a kind of device -> `module:class` of its DeviceSharing, which is made with the device's number."""


def sharing_of(port: DevicePort) -> DeviceSharing:
    """Return the shareable memory of a device. Raises SharingError if its kind has none."""
    provider = PROVIDERS.get(port.device.type)
    if provider is None:
        raise SharingError(f"no memory of {port.device.type} devices is shared between processes")
    return made(provider, port.device.index or 0)


def made(provider: str, index: int) -> DeviceSharing:
    """Return what a provider of `PROVIDERS` makes for a device. Raises SharingError."""
    module, _, name = provider.partition(":")
    found: DeviceSharing = getattr(import_module(module), name)(index)
    return found


def domain_of(sharing: DeviceSharing, readable: Collection[int]) -> str:
    """Return the name that is common to all processes which read each other's memory, or "" if there is none.

    These are the processes that see the same devices, if each of them reads the memory of all. Otherwise they are those
    on one device.

    Args:
        sharing: Shareable memory of this process's device.
        readable: Numbers of the devices whose memory a process on this device was seen to read.
    """
    if sharing.index not in readable:
        return ""
    is_all = set(readable) == set(range(len(sharing.identities)))
    names = sorted(sharing.identities) if is_all else [sharing.identities[sharing.index]]
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
