"""The port to a device that computes: methods that the host and every accelerator have. One contract suite checks all.

Words are torch's. A stream is a queue of a device's work. Each thread has a current stream for each device, to which
torch submits the thread's kernels. Side streams are all others; this port makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elastrain.device.landing import DeviceEvent


class PinError(RuntimeError):
    """Host memory that a device does not pin. Ask for less, or copy through `empty_pinned`."""


@dataclass(frozen=True, kw_only=True)
class DeviceDescription:
    """Identity of a device, and the versions that decide its bits. None: the device does not have it."""

    type: str
    """Torch's name of the kind: `cpu`, `cuda` (ROCm, too), `xpu`, `npu`, …"""
    index: int | None
    name: str
    uuid: str | None = None
    capability: str | None = None
    multiprocessors: int | None = None
    partition: str | None = None
    """MIG profile of a device that is a part of a GPU, such as `1g.10gb`."""
    runtime: str | None = None
    """Library through which torch uses the device, with its version, such as `CUDA 13.0`."""
    cudnn: str | None = None
    triton: str | None = None
    driver: str | None = None
    """Version of the device's driver. It is reported, and members may differ in it."""


class DevicePort(Protocol):
    """One device. Every method may be called from any thread, and raises the device's errors as torch does."""

    device: torch.device
    is_host: bool

    def empty(self, size: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialized tensor on the device. Raises `torch.OutOfMemoryError`."""

    def empty_pinned(self, size: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialized tensor in host memory that is pinned, if the device can pin any.

        For a device other than the host, the memory begins with a page, as direct I/O needs it.
        """

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None = None) -> DeviceEvent:
        """Copy from the device to the host on a side stream, and return the event behind the copy.

        Until the event is reached, the caller keeps the host tensor and does not look at it. It may drop the device's.
        Memory that is not pinned is copied, too, more slowly. On the host, a copy to the same memory costs nothing.

        Args:
            source: A tensor on the device.
            target: A tensor in host memory, of the same shape and dtype.
            after: The event after which the copy begins. None: it begins after the calling thread's current stream.
        """

    def copy_in(self, source: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None = None) -> DeviceEvent:
        """Copy from the host to the device on another side stream. The rest is as for `copy_out`.

        Work that reads `target` has to `wait` for the event.
        """

    def record(self, *, timing: bool = False, blocking: bool = True) -> DeviceEvent:
        """Record an event in the calling thread's current stream, behind all work that the stream has.

        Args:
            timing: Whether `elapsed_s` is asked of the event.
            blocking: Whether a thread in `synchronize` sleeps. Otherwise it may spin, which ends some µs earlier.
        """

    def synchronize(self) -> None:
        """Wait until the calling thread's current stream has no more work. Raises the device's error."""

    def current_stream(self) -> Any:
        """Return the calling thread's current stream, to be compared and printed; None on the host."""

    def side_stream(self, name: str = "") -> AbstractContextManager[None]:
        """Make a side stream the current one for a `with` block. Its work has priority over computation.

        Args:
            name: All threads share the stream of a name. The empty name means the thread's own stream.
        """

    def record_stream(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor of another stream, once it is freed, until the current stream is done with it."""

    def is_capturing(self) -> bool:
        """Return True while the calling thread captures a graph of the device's work."""

    def manual_seed(self, seed: int) -> None:
        """Seed the generator from which the device's kernels draw."""

    def memory_allocated(self) -> tuple[int, int]:
        """Return the bytes of this process's tensors on the device: now, and the most since `reset_peak_memory_stats`.

        The host's figures are the resident bytes of the process, and their peak since it began.
        """

    def reset_peak_memory_stats(self) -> None:
        """Restart the peak of `memory_allocated` from the present memory. Nothing happens on the host."""

    def mem_get_info(self) -> tuple[int, int]:
        """Return the free bytes of the device and its capacity in bytes, which all processes share."""

    def pin(self, memory: torch.Tensor, *, read_only: bool = False) -> Callable[[], None] | None:
        """Pin a contiguous host tensor where it lies, and return a function that releases it.

        Returns None if the device has no way to pin memory in place: copy through `empty_pinned`. Raises PinError if
        the device refuses. Release before the memory is freed.

        Args:
            memory: Whole pages, for all devices of the process.
            read_only: Whether the process may only read the memory, as in a mapping of another process's memory.
        """

    def describe(self) -> DeviceDescription:
        """Return the device's identity and versions. May start the device's runtime in this process."""
