"""Operations that only CUDA has, or ROCm under its name: memory pinned in place, versions, MIG profiles."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elastrain.device.port import PinError

_PORTABLE, _READ_ONLY = 1, 8
"""Flags of cudaHostRegister: for all devices; memory that the process may not write."""
_DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")


def pin(device: torch.device, memory: torch.Tensor, *, read_only: bool) -> Callable[[], None]:
    """See `DevicePort.pin`."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE | (_READ_ONLY if read_only else 0))
    if error == cuda.cudaError.success:
        return partial(cuda.cudaHostUnregister, memory.data_ptr())
    with contextlib.suppress(RuntimeError):  # CUDA keeps the error for the thread's next launch: let it be this one
        torch.ones(1, device=device)
    raise PinError(f"CUDA does not pin {memory.nbytes} bytes of host memory ({error})")


def description(properties: Any) -> dict[str, str | None]:
    """Return the fields of `DeviceDescription` that only these devices have."""
    profile = re.search(r"\bMIG (\S+)", properties.name)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    found = {
        "partition": profile and profile[1],
        "runtime": f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}",
        "cudnn": cudnn and str(cudnn),
        "driver": next((version for each in _DRIVERS if (version := _driver(each))), None),
    }
    return found if torch.version.cuda else found | {"capability": properties.gcnArchName}


def _driver(file: str) -> str | None:
    """Return the first version number in a file of the kernel, or None if there is no such file."""
    try:
        text = Path(file).read_text()
    except OSError:
        return None
    version = re.search(r"\d+(\.\d+)+", text)
    return version and version[0]
