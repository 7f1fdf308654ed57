"""CUDA support for pieces: streams and events that order copies, pinned staging memory, and the allocator's counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elastrain.offload.drives.device import Device
from elastrain.offload.drives.host import HostEngine
from elastrain.offload.drives.host_buffers import address_of, fault_in, keep_from_children, pages
from elastrain.offload.drives.port import round_up
from elastrain.offload.drives.transfer import StagingPool, own_stream
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
    """The `Lanes` of one CUDA device. Each drive's thread copies on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computing: torch.cuda.Stream | None = None

    def mark(self) -> torch.cuda.Event:
        """Record an event behind all work that is queued on the compute stream, and return it.

        Raises OffloadConfigError during the capture of a CUDA graph, or on a second stream.
        """
        stream = torch.cuda.current_stream(self._device)
        if torch.cuda.is_current_stream_capturing():
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
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting threads do not spin
        event.record(stream)
        return event

    @contextmanager
    def copying(self, mark: torch.cuda.Event) -> Iterator[None]:
        """See `Lanes.copying`."""
        stream = own_stream(self._device)
        with torch.cuda.stream(stream):
            stream.wait_event(mark)
            try:
                yield
            finally:
                ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting threads do not spin
                ended.record(stream)
                ended.synchronize()


class CudaMeter:
    """A `MemoryMeter` that reads the counts of torch's allocator."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ahead: torch.cuda.Event | None = None

    def own_bytes(self) -> tuple[int, int]:
        """Return the bytes of tensors now, and the most since `forget_peak`. The allocator's cache does not count."""
        return torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)

    def forget_peak(self) -> None:
        """Restart the peak from the present memory."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def clock(self) -> float:
        """Wait until the compute stream is done, and return the time in seconds. Copies may go on."""
        torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter()

    def keep_pace(self) -> None:
        """Wait for the work that was queued before the last call of this method.

        One point of queued work keeps it busy. Running further ahead would take memory, and would ask drives for copies
        that are due much later.
        """
        before, self._ahead = self._ahead, torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ahead.record(torch.cuda.current_stream(self._device))
        if before is not None:
            before.synchronize()


def cuda_memory(device: torch.device) -> tuple[ResizedPool, CudaMeter]:
    """Return the memory pool for pieces on a CUDA device, and the meter of the device's memory."""
    staging = StagingPool(STAGING_BYTES, _pinned)
    return ResizedPool(device, CudaLanes(device), staging), CudaMeter(device)


def host_tier(size_bytes: int) -> Device:
    """Return a tier of `size_bytes` of host memory for a device's pieces. It is pinned if CUDA is available.

    The memory is taken at once. Raises OffloadConfigError if the machine does not have that much.
    """
    if size_bytes > (free_bytes := _free_bytes()):
        raise OffloadConfigError(
            f"{size(size_bytes)} of host memory were asked for above the drives, and the machine has "
            f"{size(free_bytes)} free: ask for less"
        )
    engine = pinned_engine(size_bytes) if torch.cuda.is_available() else HostEngine(size_bytes)
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
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = cuda.cudaHostRegister(address_of(memory), memory.nbytes, 1)  # for all devices
    if error != cuda.cudaError.success:
        raise OffloadConfigError(f"CUDA does not pin {size(size_bytes)} of host memory ({error}): ask for less")
    return HostEngine(size_bytes, memory=memory, give_back=partial(_unpin, memory))


def _free_bytes() -> int:
    """Return the available memory in bytes, as the kernel estimates it."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")


def _unpin(memory: memoryview) -> None:
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cuda.cudaHostUnregister(address_of(memory))


def _pinned(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
