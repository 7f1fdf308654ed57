"""Accelerators of torch behind the port, by torch's modules: CUDA, ROCm, XPU, NPU, other PrivateUse1 devices."""

from __future__ import annotations

import importlib.metadata
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from elastrain.device import cuda_runtime
from elastrain.device.landing import DeviceEvent, LandingThread
from elastrain.device.port import DeviceDescription

_PRIORITY = -1
_TRITON = ("triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu")
"""Distributions that bring Triton."""


class Accelerator:
    """The port to one accelerator. `module` is torch's module of its kind, such as `torch.xpu`."""

    is_host = False

    def __init__(self, device: torch.device, module: Any) -> None:
        self.device = device
        self._module = module
        self._streams: dict[str | int, Any] = {}
        """Side streams by name; a thread's own one by the thread's number, which a later thread may take over."""
        self._recorded, self._out, self._in = (LandingThread(f"{device} {kind}") for kind in ("work", "out", "in"))

    def empty(self, size: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `DevicePort.empty`."""
        return torch.empty(size, dtype=dtype, device=self.device)

    def empty_pinned(self, size: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `DevicePort.empty_pinned`. Torch caches freed pinned memory."""
        try:
            return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)
        except NotImplementedError:  # a PrivateUse1 device without an allocator of pinned memory
            wanted = torch.empty(size, dtype=dtype, device="meta")
            memory = mmap.mmap(-1, max(wanted.nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages = torch.frombuffer(memory, dtype=torch.uint8)
            return pages[: wanted.nbytes].view(dtype).view(wanted.shape)

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None = None) -> DeviceEvent:
        """See `DevicePort.copy_out`."""
        after = after or self.record()
        with self.side_stream("out"):
            after.wait()
            target.copy_(source, non_blocking=True)
            self.record_stream(source)
            return self._record(self._out)

    def copy_in(self, source: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None = None) -> DeviceEvent:
        """See `DevicePort.copy_in`."""
        after = after or self.record()
        with self.side_stream("in"):
            after.wait()
            target.copy_(source, non_blocking=True)
            self.record_stream(target)
            return self._record(self._in)

    def record(self, *, timing: bool = False, blocking: bool = True) -> DeviceEvent:
        """See `DevicePort.record`."""
        return self._record(self._recorded, timing=timing, blocking=blocking)

    def _record(self, landing: LandingThread, *, timing: bool = False, blocking: bool = True) -> DeviceEvent:
        options = {} if self.device.type == "xpu" else {"blocking": blocking}
        event = self._module.Event(enable_timing=timing, **options)
        event.record(self.current_stream())
        return DeviceEvent(event, self.current_stream, landing)

    def synchronize(self) -> None:
        """See `DevicePort.synchronize`."""
        self.current_stream().synchronize()

    def current_stream(self) -> Any:
        """See `DevicePort.current_stream`."""
        return self._module.current_stream(self.device)

    @contextmanager
    def side_stream(self, name: str = "") -> Iterator[None]:
        """See `DevicePort.side_stream`.

        A thread has one stream for everything, because CUDA has only eight queues for each device, and streams that
        share a queue wait for each other.
        """
        key = name or threading.get_ident()
        stream = self._streams.get(key)
        if stream is None:  # another thread may make the same one: the first of them is kept
            stream = self._streams.setdefault(key, self._module.Stream(self.device, priority=_PRIORITY))
        with self._module.stream(stream):
            yield

    def record_stream(self, tensor: torch.Tensor) -> None:
        """See `DevicePort.record_stream`."""
        tensor.record_stream(self.current_stream())

    def is_capturing(self) -> bool:
        """See `DevicePort.is_capturing`."""
        return bool(getattr(self._module, "is_current_stream_capturing", bool)())

    def manual_seed(self, seed: int) -> None:
        """See `DevicePort.manual_seed`."""
        generators = getattr(self._module, "default_generators", ())
        if self.device.index < len(generators):  # CUDA has none before its start
            generators[self.device.index].manual_seed(seed)
        else:
            with self._module.device(self.device):
                self._module.manual_seed(seed)

    def memory_allocated(self) -> tuple[int, int]:
        """See `DevicePort.memory_allocated`. The allocator's cache does not count."""
        return self._module.memory_allocated(self.device), self._module.max_memory_allocated(self.device)

    def reset_peak_memory_stats(self) -> None:
        """See `DevicePort.reset_peak_memory_stats`."""
        self._module.reset_peak_memory_stats(self.device)

    def mem_get_info(self) -> tuple[int, int]:
        """See `DevicePort.mem_get_info`."""
        found: tuple[int, int] = self._module.mem_get_info(self.device)
        return found

    def pin(self, memory: torch.Tensor, *, read_only: bool = False) -> Callable[[], None] | None:
        """See `DevicePort.pin`. Torch has no call for it, and other devices than CUDA's none at all."""
        return cuda_runtime.pin(self.device, memory, read_only=read_only) if self.device.type == "cuda" else None

    def describe(self) -> DeviceDescription:
        """See `DevicePort.describe`."""
        kind, properties = self.device.type, self._module.get_device_properties(self.device)
        version, uuid = getattr(torch.version, kind, None), getattr(properties, "uuid", None)
        units = getattr(properties, "max_compute_units", None)  # XPU's name
        fields: dict[str, Any] = {
            "capability": _capability(properties),
            "multiprocessors": getattr(properties, "multi_processor_count", units),
            "uuid": uuid and str(uuid),
            "runtime": version and f"{kind} {version}",
            "triton": next((found for name in _TRITON if (found := _version(name))), None),
            "driver": getattr(properties, "driver_version", None),
        }
        if kind == "cuda":
            fields |= cuda_runtime.description(properties)
        return DeviceDescription(type=kind, index=self.device.index, name=properties.name, **fields)


def _capability(properties: Any) -> str | None:
    """Return CUDA's capability, or the architecture by XPU's name for it."""
    if hasattr(properties, "major"):
        return f"{properties.major}.{properties.minor}"
    architecture = getattr(properties, "architecture", None)
    return None if architecture is None else str(architecture)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
