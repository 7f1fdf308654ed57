"""A bounded pool of host memory through which device memory passes: pinned pages are slow to get and hinder others.

Buffers are whole pages, kept for the next one who needs as much. Whoever finds the pool lent out waits for a buffer.

Between a storage's memory and what engines move: CPU storages as they are, CUDA storages through pinned memory.

Called by the devices' threads only. Staging memory is bounded by their number: each stages one storage at a time.
CUDA copies run on a stream of each thread's own; host-side synchronization before anything is reported keeps the order.
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
    """Lends buffers of at most `capacity_bytes` together; one that is larger than that is lent alone. Any thread.

    `allocate` gives page-aligned bytes; `held_bytes` are what was allocated and not let go of.
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
        """At least so many bytes for the time of a `with`; waits for them."""
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
        """Give idle buffers up until there is room for a new one; the smallest first, which serve the fewest."""
        self._idle.sort(key=lambda each: -each.nbytes)
        while self._idle and self.held_bytes + wanted_bytes > self._capacity_bytes:
            self.held_bytes -= self._idle.pop().nbytes


def ready_event(storage: torch.UntypedStorage) -> torch.cuda.Event | None:
    """A mark after everything that the current stream still has to do to the storage."""
    if storage.device.type == "cpu":
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(storage.device))
    return event


def take(*, size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """CUDA memory for a storage that is to be read. Raises `torch.OutOfMemoryError`."""
    with torch.cuda.stream(_side_stream(device)):
        return torch.empty(size_bytes, dtype=torch.uint8, device=device).untyped_storage()


def hand_over(storage: torch.UntypedStorage) -> None:
    """The current stream uses memory that was taken on the side stream: it must not be given out before it has."""
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
    """Copy the storage to the device. Raises what `Device.write` raises."""
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
    """Whether anybody but us holds its memory, and may change it: Python's own object counts as one."""
    return torch._C._storage_Use_Count(storage._cdata) > 1


def is_same(device: Device, copy: Copy, storage: torch.UntypedStorage, ready: torch.cuda.Event | None) -> bool:
    """Whether the copy on the device has the bytes that are in memory now (with CUDA: when `ready` is reached)."""
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
    # torch may fill what it hands out, on the stream on which it was taken: that comes first.
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
    """Copy on the thread's own stream, and wait for it; `summed` is the one of both that lies on the device."""
    if summed.device.type == "cpu":
        began_s = time.perf_counter()
        target.copy_(source)
        took_s = time.perf_counter() - began_s
        return CopiedInPlace(checksum=tensor_checksum(summed), seconds=took_s)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    target.copy_(source, non_blocking=True)
    ended.record()
    checksum = tensor_checksum(summed)  # which waits for both
    return CopiedInPlace(checksum=checksum, seconds=began.elapsed_time(ended) / 1000)


@contextmanager
def _settled(storage: torch.UntypedStorage, ready: torch.cuda.Event) -> Iterator[torch.cuda.Stream]:
    """On the thread's own stream, after everything that was to be done to the storage."""
    side = own_stream(storage.device)
    with torch.cuda.stream(side):
        side.wait_event(ready)
        side.synchronize()
        yield side


def _on_host(storage: torch.UntypedStorage, ready: torch.cuda.Event) -> torch.Tensor:
    """The bytes of CUDA memory at the beginning of pinned memory."""
    with _settled(storage, ready) as side:
        host = _pinned(storage.nbytes())
        host[: storage.nbytes()].copy_(_tensor(storage), non_blocking=True)
        side.synchronize()
    return host


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for each thread: on a common one a read would wait for writes of what is not computed yet.

    One for all that a thread moves: CUDA has eight queues to a device, and what shares one waits for each other. Before
    what computes: sums of what was moved take no time, and somebody waits for them.
    """
    streams: dict[torch.device, torch.cuda.Stream] = _MINE.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return streams[device]


_MINE = threading.local()


def _tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pinned(size_bytes: int) -> torch.Tensor:
    """Whole pages of pinned memory (the image of a storage); torch keeps such memory for the next time."""
    return torch.empty(round_up(size_bytes), dtype=torch.uint8, pin_memory=True)
