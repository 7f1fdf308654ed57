"""Transfers between a storage's memory and an engine, and `StagingPool`, a bounded pool of host memory.

CPU storages are moved directly, those of accelerators through pinned memory unless the engine takes them directly.
`read` and `write` run in the drives' threads. Each thread stages one storage at a time, so that their number bounds the
staging memory. Each thread has its own side stream, because on a common stream a read would wait for writes of storages
that are not computed yet. It synchronizes before it reports anything.

Pinned pages are slow to allocate, and the allocation slows down other threads. The pool therefore keeps its buffers. A
thread that finds everything lent waits for a buffer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from elastrain.device import DeviceEvent, device_of
from elastrain.offload.drives.device import CopiedInPlace, Copy, Device
from elastrain.offload.drives.host_buffers import bytes_of, fault_in, image_of, shift_of, tensor_checksum
from elastrain.offload.drives.port import AddressableEngine, CudaEngine, round_up

Allocate = Callable[[int], torch.Tensor]
_ALLOCATING = "allocating"
"""Name of the side stream on which memory for reads is allocated."""


class StagingPool:
    """A pool that lends buffers of at most `capacity_bytes` in total. A larger one is lent alone. Safe from any thread.

    `allocate` returns page-aligned bytes. `held_bytes` is the size of all buffers, lent or idle.
    """

    def __init__(self, capacity_bytes: int, allocate: Allocate) -> None:
        self.held_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._allocate = allocate
        self._idle: list[torch.Tensor] = []
        self._lent_bytes = 0
        self._returned = threading.Condition()

    @contextmanager
    def lend(self, size_bytes: int) -> Iterator[torch.Tensor]:
        """Wait for a buffer of at least `size_bytes`, and lend it for a `with` block."""
        buffer = self._take(round_up(size_bytes))
        try:
            yield buffer
        finally:
            with self._returned:
                self._lent_bytes -= buffer.nbytes
                self._idle.append(buffer)
                self._returned.notify_all()

    def _take(self, size_bytes: int) -> torch.Tensor:
        with self._returned:
            while self._lent_bytes and self._lent_bytes + size_bytes > self._capacity_bytes:
                self._returned.wait()
            fitting = [each for each in self._idle if each.nbytes >= size_bytes]
            buffer = min(fitting, key=lambda each: each.nbytes, default=None)
            if buffer is None or (self._lent_bytes and self._lent_bytes + buffer.nbytes > self._capacity_bytes):
                self._let_go(size_bytes)
                buffer = self._allocate(size_bytes)
                self.held_bytes += buffer.nbytes
            else:
                self._idle = [each for each in self._idle if each is not buffer]
            self._lent_bytes += buffer.nbytes
            return buffer

    def _let_go(self, wanted_bytes: int) -> None:
        """Free idle buffers, the smallest first, until a new one fits. Small ones can serve the fewest requests."""
        self._idle.sort(key=lambda each: -each.nbytes)
        while self._idle and self.held_bytes + wanted_bytes > self._capacity_bytes:
            self.held_bytes -= self._idle.pop().nbytes


def ready_event(storage: torch.UntypedStorage) -> DeviceEvent | None:
    """Return an event after everything that the current stream still does to the storage; None for CPU storages."""
    if storage.device.type == "cpu":
        return None
    return device_of(storage.device).record()


def take(*, size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return an accelerator's memory for a storage that will be read. Raises `torch.OutOfMemoryError`."""
    port = device_of(device)
    with port.side_stream(_ALLOCATING):
        return port.empty(size_bytes, torch.uint8).untyped_storage()


def hand_over(storage: torch.UntypedStorage) -> None:
    """Tell torch's allocator that the current stream uses this memory of the side stream. Prevents early reuse."""
    if storage.device.type != "cpu":
        device_of(storage.device).record_stream(_tensor(storage))


def write(
    device: Device,
    storage: torch.UntypedStorage,
    ready: DeviceEvent | None,
    cancelled: Callable[[], bool],
    *,
    kind: str,
) -> Copy:
    """Write the storage to the device. Raises what `Device.write` raises."""
    if ready is None:
        return device.write(bytes_of(storage), shift_of(storage), cancelled, kind=kind)
    if isinstance(device.engine, CudaEngine):
        with _settled(storage, ready):
            return device.write_cuda(device.engine, [_tensor(storage)], cancelled)
    if isinstance(device.engine, AddressableEngine):

        def fill(image: memoryview) -> CopiedInPlace:
            with _settled(storage, ready):
                return copied(torch.frombuffer(image, dtype=torch.uint8), _tensor(storage), _tensor(storage))

        return device.write_in_place(device.engine, storage.nbytes(), fill, cancelled)
    host = _on_host(storage, ready)
    payload = bytes_of(host.untyped_storage())[: storage.nbytes()]
    return device.write(payload, 0, cancelled, kind=kind, is_copied=True)


def has_others(storage: torch.UntypedStorage) -> bool:
    """Return True if the program holds the storage's memory besides this Python object, and may change it."""
    return torch._C._storage_Use_Count(storage._cdata) > 1


def is_same(device: Device, copy: Copy, storage: torch.UntypedStorage, ready: DeviceEvent | None) -> bool:
    """Return True if the copy on the drive has the bytes that are in memory, once `ready` is reached."""
    if ready is None:
        return device.has(copy, bytes_of(storage))
    if isinstance(device.engine, CudaEngine | AddressableEngine):
        with _settled(storage, ready):
            return device.has_cuda(copy, _tensor(storage))
    host = _on_host(storage, ready)
    return device.has(copy, bytes_of(host.untyped_storage())[: storage.nbytes()])


def read(device: Device, copy: Copy, storage: torch.UntypedStorage, cancelled: Callable[[], bool]) -> None:
    """Fill the storage from the device. Raises what `Device.read` raises."""
    if storage.device.type == "cpu":
        image = image_of(storage, copy.shift_bytes)
        fault_in(image)
        device.read(copy, image, cancelled)
        return
    port = device_of(storage.device)
    # torch may fill new memory on the stream on which it was allocated. Wait for that first.
    with port.side_stream(_ALLOCATING):
        allocated = port.record()
    with port.side_stream():
        allocated.wait()
        if isinstance(device.engine, CudaEngine):
            port.synchronize()
            device.read_cuda(device.engine, copy, [_tensor(storage)], cancelled)
            return
        if isinstance(device.engine, AddressableEngine):

            def take(image: memoryview) -> CopiedInPlace:
                return copied(_tensor(storage), torch.frombuffer(image, dtype=torch.uint8), _tensor(storage))

            device.read_in_place(device.engine, copy, take, cancelled)
            return
        host = _pinned(storage)
        device.read(copy, image_of(host.untyped_storage(), 0), cancelled)
        _tensor(storage).copy_(host[: storage.nbytes()], non_blocking=True)
        port.synchronize()


def copied(target: torch.Tensor, source: torch.Tensor, summed: torch.Tensor) -> CopiedInPlace:
    """Copy on the thread's own stream and wait for it.

    `summed` is the one of the two tensors that lies on the device.
    """
    if summed.device.type == "cpu":
        began_s = time.perf_counter()
        target.copy_(source)
        took_s = time.perf_counter() - began_s
        return CopiedInPlace(checksum=tensor_checksum(summed), seconds=took_s)
    port = device_of(summed.device)
    began = port.record(timing=True, blocking=False)
    target.copy_(source, non_blocking=True)
    ended = port.record(timing=True, blocking=False)
    checksum = tensor_checksum(summed)  # waits for the copy
    return CopiedInPlace(checksum=checksum, seconds=began.elapsed_s(ended))


@contextmanager
def _settled(storage: torch.UntypedStorage, ready: DeviceEvent) -> Iterator[None]:
    """Enter the thread's own stream after everything that other streams still do to the storage."""
    port = device_of(storage.device)
    with port.side_stream():
        ready.wait()
        port.synchronize()
        yield


def _on_host(storage: torch.UntypedStorage, ready: DeviceEvent) -> torch.Tensor:
    """Return pinned memory that begins with the bytes of an accelerator's storage."""
    with _settled(storage, ready):
        host = _pinned(storage)
        host[: storage.nbytes()].copy_(_tensor(storage), non_blocking=True)
        device_of(storage.device).synchronize()
    return host


def _tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pinned(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return whole pages of pinned memory, which hold the page image of a storage. torch caches such memory."""
    return device_of(storage.device).empty_pinned(round_up(storage.nbytes()), torch.uint8)
