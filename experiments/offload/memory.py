"""Peak memory of one step, measured twice: by the kernel (resident set) or by torch on a CUDA device, and by an account
of saved storages.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def peak_rss_bytes(step: Callable[[], None]) -> int:
    """How far the resident set rose in `step` above where it was: parameters, gradients and torch are left out."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes = _status_bytes("VmRSS")
    step()
    return _status_bytes("VmHWM") - before_bytes


def peak_allocated_bytes(step: Callable[[], None]) -> int:
    """The same on a CUDA device, by torch's allocator."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before_bytes


class Account:
    """Bytes of storages that autograd has saved and that are alive, parameters left out: independent of ours."""

    def __init__(self, parameters: list[Tensor], min_bytes: int) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self._min_bytes = min_bytes
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.live_bytes = self.peak_bytes = 0

    def around(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key, size_bytes = storage.data_ptr(), storage.nbytes()
        if key not in self._parameters and key not in self._alive and size_bytes >= self._min_bytes:
            self._alive[key] = weakref.ref(storage, lambda _: self._gone(key, size_bytes))
            self.live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return tensor.detach()

    def _gone(self, key: int, size_bytes: int) -> None:
        del self._alive[key]
        self.live_bytes -= size_bytes
