"""States in host memory in a job on a device. A snapshot store uses it like a disk, for the backups of a member."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from elastrain.device.landing import DeviceEvent
from elastrain.device.port import DevicePort


@dataclass(frozen=True)
class HostState:
    """The tensors of a state in host memory. They never change, so readers may share them."""

    tensors: list[Tensor]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class StatesOnHost:
    """A `Disk` over pinned host memory. Its methods wait until the device has copied. Used by one thread."""

    def __init__(self, port: DevicePort) -> None:
        self._port = port

    def write(self, shard: int, tensors: Sequence[Tensor]) -> HostState:
        """Copy the tensors of a state to host memory. Those that lie there already are copied, too."""
        copies = [self._port.empty_pinned(tensor.numel(), tensor.dtype) for tensor in tensors]
        made, landed = self._port.record(), list[DeviceEvent]()
        for tensor, copy in zip(tensors, copies, strict=True):
            if tensor.device.type == "cpu":
                copy.copy_(tensor)
            else:
                landed.append(self._port.copy_out(tensor, copy, made))
        for event in landed[-1:]:
            event.synchronize()  # the copies share a stream: the last one ends last
        return HostState(copies)

    def read(self, shard: int, stored: object) -> list[Tensor]:
        """Return the tensors of a state in new memory of the device."""
        assert isinstance(stored, HostState)
        copies = [self._port.empty(tensor.numel(), tensor.dtype) for tensor in stored.tensors]
        made = self._port.record()
        landed = [self._port.copy_in(tensor, copy, made) for tensor, copy in zip(stored.tensors, copies, strict=True)]
        landed[-1].synchronize()
        return copies

    def free(self, stored: object) -> None:
        """Do nothing: the memory is free once no reader has the tensors."""
