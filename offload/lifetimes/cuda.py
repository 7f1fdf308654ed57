"""CUDA below pieces: streams and events that order copies, pinned staging memory, and the allocator's own counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from elastrain.offload.device import Device
from elastrain.offload.engines.host import HostEngine
from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.lifetimes.resized import ResizedPool
from elastrain.offload.staging import StagingPool

STAGING_BYTES = 1 << 30
"""Pinned memory of the host: some large pieces at a time, so that a drive's threads seldom wait for each other."""

HOST_THREADS = 6
"""One thread copies and sums 5 GB/s; a bus to the host moves ten times as much."""


class CudaLanes:
    """`Lanes` of one CUDA device: each drive's thread copies on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computing: torch.cuda.Stream | None = None
        self._mine = threading.local()

    def mark(self) -> torch.cuda.Event:
        """An event behind all that the compute stream has to do. Raises OffloadConfigError."""
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
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    @contextmanager
    def copying(self, mark: torch.cuda.Event) -> Iterator[None]:
        """As `Lanes.copying`."""
        stream = self._stream()
        with torch.cuda.stream(stream):
            stream.wait_event(mark)
            try:
                yield
            finally:
                stream.synchronize()

    def _stream(self) -> torch.cuda.Stream:
        found: torch.cuda.Stream | None = getattr(self._mine, "stream", None)
        if found is None:
            found = self._mine.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return found


class CudaMeter:
    """`MemoryMeter` by the counts of torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def own_bytes(self) -> tuple[int, int]:
        """What tensors take now, and at most since `forget_peak`; what the allocator keeps for later is not in it."""
        return torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)

    def forget_peak(self) -> None:
        """Let the peak begin anew from what is held now."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def clock(self) -> float:
        """Seconds at which the device has done all that it was asked for."""
        torch.cuda.synchronize(self._device)
        return time.perf_counter()


def cuda_memory(device: torch.device) -> tuple[ResizedPool, CudaMeter]:
    """The memory of pieces on a CUDA device, and who tells how much of it is held."""
    staging = StagingPool(STAGING_BYTES, _pinned)
    return ResizedPool(device, CudaLanes(device), staging), CudaMeter(device)


def host_tier(size_bytes: int) -> Device:
    """So many bytes of host memory above the drives, for the pieces of a device."""
    return Device(HostEngine(size_bytes), quota_bytes=size_bytes, threads=HOST_THREADS)


def _pinned(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
