"""The memory of a member's tensors: the device's, which computes, and shared memory, which peers read.

Shared memory is the host's, or the device's for peers that read it in place. On the host all are the same, and nothing
is copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from elastrain.base.processes import say
from elastrain.comm.shm.device_segments import DeviceShare
from elastrain.device.port import DevicePort, PinError
from elastrain.device.same_memory import HOST
from elastrain.runtime.model.flats import Allocate, allocated, in_private_memory
from elastrain.snapshot.digest import checksum, digest


class PinInPlace:
    """A `Pin` by a device's port. A device that refuses copies more slowly, and the first refusal is said."""

    def __init__(self, port: DevicePort, log: Callable[..., None]) -> None:
        self._port = port
        self._log = log
        self._is_refused = False

    def __call__(self, memory: memoryview, read_only: bool) -> Callable[[], object] | None:
        """See `elastrain.comm.shm.shared_memory.Pin`."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            whole = torch.frombuffer(memory, dtype=torch.uint8)
        try:
            return None if self._is_refused else self._port.pin(whole, read_only=read_only)
        except PinError as error:
            self._is_refused = True
            self._log("not_pinned", bytes=whole.nbytes, reason=str(error))
            say(f"{error}: copies from and to {self._port.device} are slower; raise the limit of locked memory")
            return None


class TensorMemory:
    """The memories of a member, and the copies between them. The engine's thread calls it, and waits for copies.

    Args:
        shared: Allocates zeroed host memory that peers can read.
        scratch: Allocates such memory with any content. It is not used again before all peers have read it.
        port: Device that computes.
        share: Memory of the device that peers on this host read in place. None: everything is carried.
    """

    def __init__(
        self,
        shared: Allocate,
        scratch: Allocate | None = None,
        port: DevicePort = HOST,
        share: DeviceShare | None = None,
    ) -> None:
        self.port = port
        self.shared = shared
        self._scratch = scratch or shared
        self._share = share

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a zeroed tensor for computation; an `Allocate`. On the host, peers can read it."""
        return self.shared(numel, dtype) if self.port.is_host else self.private(numel, dtype)

    def private(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a zeroed tensor for computation that no peer reads; an `Allocate`."""
        return in_private_memory(numel, dtype) if self.port.is_host else self.port.empty(numel, dtype).zero_()

    def is_far(self, tensor: Tensor) -> bool:
        """Return True if the tensor has to be copied before the device computes with it.

        It lies in host memory, or in a peer's memory: that is given back once no tensor here refers to it, so only
        `copy` and its like, which wait, may read it.
        """
        return not self.port.is_host and (tensor.device.type == "cpu" or self._is_foreign(tensor))

    def _is_foreign(self, tensor: Tensor) -> bool:
        return self._share is not None and self._share.is_foreign(tensor)

    def carried(self, tensors: Sequence[Tensor], *, in_place: bool = False) -> list[Tensor]:
        """Return tensors that peers can read: copies of those on a device, and all others themselves.

        The copies are complete when it returns.

        Args:
            tensors: Tensors of a message.
            in_place: Whether the peer reads the device's memory. The copies lie there then, as far as there is room.
        """
        if self.port.is_host:
            return list(tensors)
        carried, events = [], []
        for tensor in tensors:
            if tensor.device.type != "cpu" and not (in_place and self._is_shared(tensor)):
                source, tensor = tensor, self.outgoing(tensor.numel(), tensor.dtype, in_place=in_place)
                events.append(self.port.copy_out(source, tensor))
            carried.append(tensor)
        for event in events:
            event.synchronize()
        return carried

    def _is_shared(self, tensor: Tensor) -> bool:
        return self._share is not None and self._share.is_own(tensor)

    def outgoing(self, numel: int, dtype: torch.dtype, *, in_place: bool) -> Tensor:
        """Allocate memory with any content that peers read: the device's if `in_place`, as far as there is room."""
        if in_place and self._share is not None and numel:
            made = self._share.scratch(numel, dtype)
            if made is not None:
                return made
        return allocated(self._scratch, numel, dtype)

    def taken_in(self, tensor: Tensor) -> Tensor:
        """Return a copy of a payload's tensor, in private memory to compute with."""
        made = self.port.empty(tensor.shape, tensor.dtype)
        self.copy(tensor, made)
        return made

    def taken_piece(self, piece: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of several tensors of a payload, in private memory."""
        return [self.taken_in(tensor) for tensor in piece]

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Copy between any two of a member's tensors. The source is free when it returns, even for a device."""
        if self.is_far(source) and (out.device.type != "cpu" or self._is_foreign(source)):
            copy = self.port.copy_out if out.device.type == "cpu" else self.port.copy_in
            landed = copy(source, out)
            landed.wait()
            landed.synchronize()  # the source is a peer's memory, which the peer uses again once it is dropped here
        else:
            out.copy_(source)

    @property
    def checksum(self) -> Callable[[Tensor], int]:
        """The function for checksums of what travels. All members of a job have the same one."""
        return checksum if self.port.is_host else self._digest

    def _digest(self, tensor: Tensor) -> int:
        return digest(self.taken_in(tensor) if self.is_far(tensor) else tensor)
