"""Transfers between a storage's memory and an engine, and `StagingPool`, a bounded pool of host memory.

CPU storages are moved directly, CUDA storages through pinned memory unless the engine takes them directly. `read` and
`write` run in the devices' threads. Each thread stages one storage at a time, so that their number bounds the staging
memory. Each thread has its own CUDA stream, and synchronizes before it reports anything.

Pinned pages are slow to allocate, and the allocation slows down other threads. The pool therefore keeps its buffers. A
thread that finds everything lent waits for a buffer.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from elastrain.offload.drives.device import CopiedInPlace, Copy, Device
from elastrain.offload.drives.host_buffers import bytes_of, fault_in, image_of, shift_of, tensor_checksum
from elastrain.offload.drives.port import AddressableEngine, CudaEngine, round_up

Allocate = Callable[[int], torch.Tensor]


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


def ready_event(storage: torch.UntypedStorage) -> torch.cuda.Event | None:
    """Return an event after everything that the current stream still does to the storage; None for CPU storages."""
    if storage.device.type == "cpu":
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(storage.device))
    return event


def take(*, size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return CUDA memory for a storage that will be read. Raises `torch.OutOfMemoryError`."""
    with torch.cuda.stream(_side_stream(device)):
        return torch.empty(size_bytes, dtype=torch.uint8, device=device).untyped_storage()


def hand_over(storage: torch.UntypedStorage) -> None:
    """Tell torch's allocator that the current stream uses this memory of the side stream. Prevents early reuse."""
    if storage.device.type != "cpu":
        _tensor(storage).record_stream(torch.cuda.current_stream(storage.device))


def write(
    device: Device,
    storage: torch.UntypedStorage,
    ready: torch.cuda.Event | None,
    cancelled: Callable[[], bool],
    *,
    kind: str,
) -> Copy:
    """Write the storage to the device. Raises what `Device.write` raises."""
    if ready is None:
        return device.write(bytes_of(storage), shift_of(storage), cancelled, kind=kind)
    if isinstance(device.engine, CudaEngine):
        with _settled(storage, ready):
            return device.write_cuda(device.engine, _tensor(storage), cancelled)
    if isinstance(device.engine, AddressableEngine):

        def fill(image: memoryview) -> CopiedInPlace:
            with _settled(storage, ready):
                return copied(torch.frombuffer(image, dtype=torch.uint8), _tensor(storage), _tensor(storage))

        return device.write_in_place(device.engine, storage.nbytes(), fill, cancelled)
    host = _on_host(storage, ready)
    return device.write(bytes_of(host.untyped_storage())[: storage.nbytes()], 0, cancelled, kind=kind)


def has_others(storage: torch.UntypedStorage) -> bool:
    """Return True if the program holds the storage's memory besides this Python object, and may change it."""
    return torch._C._storage_Use_Count(storage._cdata) > 1


def is_same(device: Device, copy: Copy, storage: torch.UntypedStorage, ready: torch.cuda.Event | None) -> bool:
    """Return True if the copy on the device has the bytes that are in memory (with CUDA: once `ready` is reached)."""
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
    side = own_stream(storage.device)
    # torch may fill new memory on the stream on which it was allocated. Wait for that first.
    side.wait_stream(_side_stream(storage.device))
    with torch.cuda.stream(side):
        if isinstance(device.engine, CudaEngine):
            side.synchronize()
            device.read_cuda(device.engine, copy, _tensor(storage), cancelled)
            return
        if isinstance(device.engine, AddressableEngine):

            def take(image: memoryview) -> CopiedInPlace:
                return copied(_tensor(storage), torch.frombuffer(image, dtype=torch.uint8), _tensor(storage))

            device.read_in_place(device.engine, copy, take, cancelled)
            return
        host = _pinned(storage.nbytes())
        device.read(copy, image_of(host.untyped_storage(), 0), cancelled)
        _tensor(storage).copy_(host[: storage.nbytes()], non_blocking=True)
        side.synchronize()


def copied(target: torch.Tensor, source: torch.Tensor, summed: torch.Tensor) -> CopiedInPlace:
    """Copy on the thread's own stream and wait for it.

    `summed` is the one of the two tensors that lies on the device.
    """
    if summed.device.type == "cpu":
        began_s = time.perf_counter()
        target.copy_(source)
        took_s = time.perf_counter() - began_s
        return CopiedInPlace(checksum=tensor_checksum(summed), seconds=took_s)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    target.copy_(source, non_blocking=True)
    ended.record()
    checksum = tensor_checksum(summed)  # waits for the copy
    return CopiedInPlace(checksum=checksum, seconds=began.elapsed_time(ended) / 1000)


@contextmanager
def _settled(storage: torch.UntypedStorage, ready: torch.cuda.Event) -> Iterator[torch.cuda.Stream]:
    """Enter the thread's own stream after everything that other streams still do to the storage."""
    side = own_stream(storage.device)
    with torch.cuda.stream(side):
        side.wait_event(ready)
        side.synchronize()
        yield side


def _on_host(storage: torch.UntypedStorage, ready: torch.cuda.Event) -> torch.Tensor:
    """Return pinned memory that begins with the bytes of a CUDA storage."""
    with _settled(storage, ready) as side:
        host = _pinned(storage.nbytes())
        host[: storage.nbytes()].copy_(_tensor(storage), non_blocking=True)
        side.synchronize()
    return host


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """Return this thread's stream.

    On a common stream, a read would wait for writes of storages that are not computed yet.

    A thread uses one stream for everything, because CUDA has only eight queues per device, and streams that share a
    queue wait for each other. The stream has priority over computation: its checksums are short, and other threads wait
    for them.
    """
    streams: dict[torch.device, torch.cuda.Stream] = _MINE.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return streams[device]


_MINE = threading.local()


def _tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pinned(size_bytes: int) -> torch.Tensor:
    """Return whole pages of pinned memory, which hold the page image of a storage. torch caches such memory."""
    return torch.empty(round_up(size_bytes), dtype=torch.uint8, pin_memory=True)
