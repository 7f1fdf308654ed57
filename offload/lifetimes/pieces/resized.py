"""Memory of pieces on a device: a storage whose bytes are freed and allocated again, while all tensors over it stay.

The storage of a piece that is out has no bytes; a CUDA kernel that touches it fails with an illegal access. Bytes pass
through staging memory of the host, on a side stream; a tier of host memory is copied directly. A drive's thread waits
for its copies before it reports the end of a read or write. New bytes of a piece may have belonged to another tensor
that queued kernels still use. So a copy into them waits for the mark that was made at their allocation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from elastrain.offload.drives.device import CopiedInPlace, Copy, Device
from elastrain.offload.drives.host_buffers import bytes_of, image_of
from elastrain.offload.drives.port import AddressableEngine, CudaEngine, round_up
from elastrain.offload.drives.transfer import StagingPool, copied
from elastrain.offload.lifetimes.pieces.piece_memory import Access, PieceMemory, Span


class Lanes(Protocol):
    """The order between computing and copying."""

    def mark(self) -> Any:
        """Return a mark behind all work queued so far, in the computing thread. Raises OffloadConfigError."""

    def copying(self, mark: Any) -> AbstractContextManager[None]:
        """Order copies inside the `with` block after the mark, and wait for them at its end. In a drive's thread."""


class ResizedPiece:
    """One piece on a device."""

    def __init__(self, size_bytes: int, device: torch.device, lanes: Lanes, staging: StagingPool) -> None:
        self.size_bytes = round_up(size_bytes)
        self.tensor = torch.empty(self.size_bytes, dtype=torch.uint8, device=device)
        self.mark: Any = None
        self.access = Access.READ  # always, since writes cannot be detected on a device
        self._lanes = lanes
        self._staging = staging

    def part(self, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        """See `PieceMemory.part`. The part shares the piece's storage, which is resized as a whole."""
        return self.tensor[offset_bytes : offset_bytes + size_bytes]

    def allow(self, access: Access) -> None:
        """Do nothing: access to a storage without bytes is illegal anyway, and device memory cannot be protected."""

    def write(self, device: Device, span: Span, cancelled: Callable[[], bool]) -> Copy:
        """See `PieceMemory.write`."""
        part = self._part(span)
        if isinstance(device.engine, CudaEngine):
            with self._lanes.copying(self.mark):
                pass  # wait until the computation of its bytes has ended
            return device.write_cuda(device.engine, [part], cancelled)
        if isinstance(device.engine, AddressableEngine):

            def fill(image: memoryview) -> CopiedInPlace:
                with self._lanes.copying(self.mark):
                    return copied(torch.frombuffer(image, dtype=torch.uint8), part, part)

            return device.write_in_place(device.engine, span.size_bytes, fill, cancelled)
        with self._staging.lend(span.size_bytes) as host:
            with self._lanes.copying(self.mark):
                host[: span.size_bytes].copy_(part, non_blocking=True)
            return device.write(bytes_of(host.untyped_storage())[: span.size_bytes], 0, cancelled, is_copied=True)

    def read(self, device: Device, span: Span, copy: Copy, cancelled: Callable[[], bool]) -> None:
        """See `PieceMemory.read`."""
        part = self._part(span)
        if isinstance(device.engine, CudaEngine):
            with self._lanes.copying(self.mark):
                pass  # wait until the former user of the memory has ended
            device.read_cuda(device.engine, copy, [part], cancelled)
            return
        if isinstance(device.engine, AddressableEngine):

            def take(image: memoryview) -> CopiedInPlace:
                with self._lanes.copying(self.mark):
                    return copied(part, torch.frombuffer(image, dtype=torch.uint8), part)

            device.read_in_place(device.engine, copy, take, cancelled)
            return
        with self._staging.lend(span.size_bytes) as host:
            device.read(copy, image_of(host.untyped_storage(), 0)[: round_up(span.size_bytes)], cancelled)
            with self._lanes.copying(self.mark):
                part.copy_(host[: span.size_bytes], non_blocking=True)

    def _part(self, span: Span) -> torch.Tensor:
        return self.tensor[span.begin_bytes : span.begin_bytes + span.size_bytes]


class ResizedPool:
    """The memory of a device's pieces. Nothing is parked, since the device's allocator keeps freed memory."""

    def __init__(self, device: torch.device, lanes: Lanes, staging: StagingPool) -> None:
        self.parked_bytes = 0
        self._device = device
        self._lanes = lanes
        self._staging = staging

    def make(self, size_bytes: int) -> ResizedPiece:
        """Return memory for a new piece."""
        piece = ResizedPiece(size_bytes, self._device, self._lanes, self._staging)
        piece.mark = self._lanes.mark()
        return piece

    def mark(self, memory: PieceMemory) -> None:
        """See `MemoryPool.mark`."""
        _resized(memory).mark = self._lanes.mark()

    def take_from(self, memory: PieceMemory) -> None:
        """Free a piece's bytes.

        Work on them that is queued on the compute stream runs before that of their next owner.
        """
        memory.tensor.untyped_storage().resize_(0)

    def give_to(self, memory: PieceMemory) -> None:
        """Allocate bytes for a piece. Raises `torch.OutOfMemoryError`."""
        memory.tensor.untyped_storage().resize_(memory.size_bytes)
        self.mark(memory)

    def trim(self, keep_bytes: int) -> None:
        """Do nothing, since nothing is parked."""


def _resized(memory: PieceMemory) -> ResizedPiece:
    assert isinstance(memory, ResizedPiece)
    return memory
