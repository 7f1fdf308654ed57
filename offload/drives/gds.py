"""GPUDirect Storage through KvikIO: CUDA memory moves to SSD and back without a copy in host memory.

KvikIO does no I/O without libcuda, and its first call can hang forever if the driver is broken. It is used only after
`probe` has written and read bytes in a separate process, within a time limit.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from elastrain.offload.drives.posix import PosixEngine, close_in_children
from elastrain.offload.errors import OffloadConfigError

PROBE_BYTES = 1 << 20
# The default of KvikIO. Its default number of threads is one.
TASK_BYTES = 4 << 20

_PROBE = """
import sys, tempfile, torch, kvikio
size_bytes = int(sys.argv[2])
there = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device="cuda")
back = torch.zeros_like(there)
with tempfile.NamedTemporaryFile(dir=sys.argv[1]) as file:
    with kvikio.CuFile(file.name, "r+") as slab:
        assert slab.pwrite(there).get() == size_bytes
        assert slab.pread(back).get() == size_bytes
assert torch.equal(there, back)
"""


def probe(directory: str | os.PathLike[str], *, size_bytes: int = PROBE_BYTES, timeout_s: float = 60.0) -> str | None:
    """Return why KvikIO cannot be used with `directory`, or None if CUDA bytes were written and read back equal."""
    if not torch.cuda.is_available():
        return "this process sees no CUDA device, and KvikIO moves CUDA tensors only"
    command = [sys.executable, "-c", _PROBE, os.fspath(directory), str(size_bytes)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"KvikIO did not move {size_bytes} bytes within {timeout_s} s: look at the driver"
    if ran.returncode:
        lines = ran.stderr.strip().splitlines()
        return f"KvikIO failed: {lines[-1] if lines else f'exit status {ran.returncode}'}"
    return None


class GdsEngine:
    """An engine with the slab file of `PosixEngine` that also moves CUDA memory.

    The constructor raises `OffloadConfigError` if the probe fails.
    """

    def __init__(self, directory: str | os.PathLike[str], *, threads: int = 4) -> None:
        why = probe(directory)
        if why is not None:
            raise OffloadConfigError(f"GPUDirect Storage cannot be used in {directory}: {why}")
        # CPU tensors are moved by `PosixEngine`, because KvikIO would copy them through a buffer of its own.
        self._slab = PosixEngine(directory)
        self.name = self._slab.name
        kvikio: Any = import_module("kvikio")
        defaults: Any = import_module("kvikio.defaults")
        defaults.set({"num_threads": threads, "task_size": TASK_BYTES})
        self._file = kvikio.CuFile(self._slab.path(), "r+")
        close_in_children(self)

    def reserve(self, size_bytes: int) -> None:
        """Make the first `size_bytes` of the slab usable."""
        self._slab.reserve(size_bytes)

    def write(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        """Write host memory, by `PosixEngine`."""
        self._slab.write(offset_bytes, views)

    def read(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        """Fill host memory, by `PosixEngine`."""
        self._slab.read(offset_bytes, views)

    def capacity_bytes(self) -> int:
        """Return the size of the file system."""
        return self._slab.capacity_bytes()

    def write_cuda(self, offset_bytes: int, memory: torch.Tensor) -> None:
        """Write a contiguous CUDA tensor of bytes. The caller has waited until its content is computed."""
        self._check("write", self._file.pwrite(memory, memory.nbytes, offset_bytes).get(), memory.nbytes)

    def read_cuda(self, offset_bytes: int, memory: torch.Tensor) -> None:
        """Fill a contiguous CUDA tensor of bytes. It is complete when this returns."""
        self._check("read", self._file.pread(memory, memory.nbytes, offset_bytes).get(), memory.nbytes)

    def close(self) -> None:
        """Close the file and free the slab."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
        self._slab.close()

    def _check(self, verb: str, moved_bytes: int, wanted_bytes: int) -> None:
        if moved_bytes != wanted_bytes:
            raise OSError(errno.EIO, f"short {verb}: {moved_bytes} of {wanted_bytes} bytes", self.name)
