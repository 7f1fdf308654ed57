"""Support for pieces on a device: events that order copies, pinned staging memory, and the allocator's counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from elastrain.device import DeviceEvent, DevicePort, PinError, current_device, device_of
from elastrain.device.same_memory import HOST
from elastrain.offload.drives.device import Device
from elastrain.offload.drives.host import HostEngine
from elastrain.offload.drives.host_buffers import fault_in, keep_from_children, pages
from elastrain.offload.drives.port import round_up
from elastrain.offload.drives.transfer import StagingPool
from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.lifetimes.pieces.resized import ResizedPool
from elastrain.offload.planning.profile import size

STAGING_BYTES = 1 << 30
"""Bytes of pinned host memory. It holds several large pieces, so that a drive's threads seldom wait for each other."""

HOST_THREADS = 4
"""Threads of the host tier, two for each direction: one copies while the device computes the other one's checksum."""
STEP_BYTES = 256 << 20
"""Bytes that one thread touches at a time."""
HOST_BYTES_PER_S = 20e9
"""Rate of the host tier until it is measured.

It is above any drive's, so pieces go there first before there is a plan.
"""


class CudaLanes:
    """The `Lanes` of one device. Each drive's thread copies on a stream of its own."""

    def __init__(self, device: DevicePort) -> None:
        self._device = device
        self._computing: Any = None

    def mark(self) -> DeviceEvent:
        """Record an event behind all work that is queued on the compute stream, and return it.

        Raises OffloadConfigError during the capture of a CUDA graph, or on a second stream.
        """
        stream = self._device.current_stream()
        if self._device.is_capturing():
            raise OffloadConfigError(
                "a CUDA graph is being captured of a model whose memory comes and goes: a graph replays fixed "
                "addresses; train it without CUDA graphs, or leave it out of offload.within"
            )
        if self._computing is None:
            self._computing = stream
        if stream != self._computing:
            raise OffloadConfigError(
                f"this step uses a second CUDA stream ({stream}): memory is handed on in the order of one; run the "
                f"forward, the backward and step() of a model in offload.within on the same stream"
            )
        return self._device.record()

    @contextmanager
    def copying(self, mark: DeviceEvent) -> Iterator[None]:
        """See `Lanes.copying`."""
        with self._device.side_stream():
            mark.wait()
            try:
                yield
            finally:
                self._device.record().synchronize()


class CudaMeter:
    """A `MemoryMeter` that reads the counts of torch's allocator."""

    runs_ahead = True

    def __init__(self, device: DevicePort) -> None:
        self._device = device
        self._ahead: DeviceEvent | None = None

    def own_bytes(self) -> tuple[int, int]:
        """Return the bytes of tensors now, and the most since `forget_peak`. The allocator's cache does not count."""
        return self._device.memory_allocated()

    def forget_peak(self) -> None:
        """Restart the peak from the present memory."""
        self._device.reset_peak_memory_stats()

    def clock(self) -> float:
        """Wait until the compute stream is done, and return the time in seconds. Copies may go on."""
        self._device.synchronize()
        return time.perf_counter()

    def keep_pace(self) -> None:
        """Wait for the work that was queued before the last call of this method.

        One point of queued work keeps it busy. Running further ahead would take memory, and would ask drives for copies
        that are due much later.
        """
        before, self._ahead = self._ahead, self._device.record(blocking=False)
        if before is not None:
            before.synchronize()


def cuda_memory(device: torch.device) -> tuple[ResizedPool, CudaMeter]:
    """Return the memory pool for pieces on a CUDA device, and the meter of the device's memory."""
    port = device_of(device)
    staging = StagingPool(STAGING_BYTES, partial(port.empty_pinned, dtype=torch.uint8))
    return ResizedPool(device, CudaLanes(port), staging), CudaMeter(port)


def host_tier(size_bytes: int) -> Device:
    """Return a tier of `size_bytes` of host memory for a device's pieces. It is pinned if there is an accelerator.

    The memory is taken at once. Raises OffloadConfigError if the machine does not have that much.
    """
    if size_bytes > (free_bytes := HOST.mem_get_info()[0]):
        raise OffloadConfigError(
            f"{size(size_bytes)} of host memory were asked for above the drives, and the machine has "
            f"{size(free_bytes)} free: ask for less"
        )
    engine = HostEngine(size_bytes) if current_device().is_host else pinned_engine(size_bytes)
    found = Device(engine, quota_bytes=size_bytes, threads=HOST_THREADS)
    found.reads.recent_bytes_per_s = found.writes.recent_bytes_per_s = HOST_BYTES_PER_S
    return found


def pinned_engine(size_bytes: int) -> HostEngine:
    """Return host memory that a device copies to and from directly, at bus speed. Raises OffloadConfigError."""
    memory = pages(round_up(size_bytes))
    keep_from_children(memory)
    with ThreadPoolExecutor() as several:  # one thread touches only 2 GB per second
        list(
            several.map(fault_in, (memory[begin : begin + STEP_BYTES] for begin in range(0, memory.nbytes, STEP_BYTES)))
        )
    try:
        release = current_device().pin(torch.frombuffer(memory, dtype=torch.uint8))
    except PinError as error:
        raise OffloadConfigError(
            f"{size(size_bytes)} of host memory cannot be pinned ({error}): ask for less"
        ) from None
    return HostEngine(size_bytes, memory=memory, give_back=release or (lambda: None))
