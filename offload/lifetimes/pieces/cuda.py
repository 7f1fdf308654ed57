"""CUDA below pieces: streams and events that order copies, pinned staging memory, and the allocator's own counts."""

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
"""Pinned memory of the host: some large pieces at a time, so that a drive's threads seldom wait for each other."""

HOST_THREADS = 4
"""Two for each direction: one copies while the other one's copy is summed, on the device."""
STEP_BYTES = 256 << 20
"""What one thread touches at a time."""
HOST_BYTES_PER_S = 20e9
"""Until it is measured: much more than a drive, so that pieces go there first as long as nothing is planned."""


class CudaLanes:
    """`Lanes` of one CUDA device: each drive's thread copies on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computing: torch.cuda.Stream | None = None

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
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits for it does not spin
        event.record(stream)
        return event

    @contextmanager
    def copying(self, mark: torch.cuda.Event) -> Iterator[None]:
        """As `Lanes.copying`."""
        stream = own_stream(self._device)
        with torch.cuda.stream(stream):
            stream.wait_event(mark)
            try:
                yield
            finally:
                ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # many threads wait: none spins
                ended.record(stream)
                ended.synchronize()


class CudaMeter:
    """`MemoryMeter` by the counts of torch's allocator."""

    runs_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ahead: torch.cuda.Event | None = None

    def own_bytes(self) -> tuple[int, int]:
        """What tensors take now, and at most since `forget_peak`; what the allocator keeps for later is not in it."""
        return torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)

    def forget_peak(self) -> None:
        """Let the peak begin anew from what is held now."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def clock(self) -> float:
        """Seconds at which the device has computed all that it was asked for; copies may go on."""
        torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter()

    def keep_pace(self) -> None:
        """Wait until the device is where this was called last: a point ahead keeps it busy.

        Who is further ahead takes memory, and asks drives for copies, whose turn comes much later.
        """
        before, self._ahead = self._ahead, torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ahead.record(torch.cuda.current_stream(self._device))
        if before is not None:
            before.synchronize()


def cuda_memory(device: torch.device) -> tuple[ResizedPool, CudaMeter]:
    """The memory of pieces on a CUDA device, and who tells how much of it is held."""
    staging = StagingPool(STAGING_BYTES, _pinned)
    return ResizedPool(device, CudaLanes(device), staging), CudaMeter(device)


def host_tier(size_bytes: int) -> Device:
    """So many bytes of host memory above the drives, for the pieces of a device; where there is CUDA, pinned ones.

    All of them are taken at once. Raises OffloadConfigError where the machine does not have them.
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
    """Host memory that a device copies to and from by itself, at the speed of the bus. Raises OffloadConfigError."""
    memory = pages(round_up(size_bytes))
    keep_from_children(memory)
    with ThreadPoolExecutor() as several:  # the kernel takes a second for each 2 GB that one thread touches
        list(
            several.map(fault_in, (memory[begin : begin + STEP_BYTES] for begin in range(0, memory.nbytes, STEP_BYTES)))
        )
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = cuda.cudaHostRegister(address_of(memory), memory.nbytes, 1)  # for all devices
    if error != cuda.cudaError.success:
        raise OffloadConfigError(f"CUDA does not pin {size(size_bytes)} of host memory ({error}): ask for less")
    return HostEngine(size_bytes, memory=memory, give_back=partial(_unpin, memory))


def _free_bytes() -> int:
    """What programs can still get, as the kernel estimates."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")


def _unpin(memory: memoryview) -> None:
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cuda.cudaHostUnregister(address_of(memory))


def _pinned(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
