"""KvikIO: CUDA memory moves to SSD and back by GPUDirect Storage, or in a compatibility mode of cuFile or of KvikIO.

KvikIO does no I/O without libcuda, and its first call can hang forever if the driver is broken. It is used only after
`probe` has written and read bytes in separate processes, within a time limit. No library says which way bytes go. So
the first process forbids both compatibility modes, and each later one allows one more: the first that succeeds names
the way.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from elastrain.offload.drives.host_buffers import bytes_of
from elastrain.offload.drives.port import IoEngine
from elastrain.offload.drives.posix import PosixEngine, close_in_children
from elastrain.offload.errors import OffloadConfigError

PROBE_BYTES = 32 << 20
ODD_BYTES = 12_345
"""Size of a tensor that is no whole number of pages."""
# The default of KvikIO. Its default number of threads is one.
TASK_BYTES = 4 << 20
WAYS = {
    "GPUDirect": {"KVIKIO_COMPAT_MODE": "OFF", "CUFILE_ALLOW_COMPAT_MODE": "false"},
    "cuFile's compatibility mode": {"KVIKIO_COMPAT_MODE": "OFF", "CUFILE_ALLOW_COMPAT_MODE": "true"},
    "KvikIO's compatibility mode": {"KVIKIO_COMPAT_MODE": "ON"},
}
"""Ways of KvikIO, the fastest first -> variables that forbid all ways before it, with which it is used, too."""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """Answer of a probe: the way that works, or why none does."""

    why_not: str | None = None
    moved_by: str = ""
    seconds: float = 0.0
    """Time in which KvikIO wrote and read the bytes of the probe."""
    own_seconds: float = 0.0
    """Time in which our own pinned copies did the same."""


def probe(directory: str | os.PathLike[str], *, size_bytes: int = PROBE_BYTES, timeout_s: float = 60.0) -> Probed:
    """Find the way in which KvikIO writes CUDA bytes to `directory` and reads them back equal, and its time."""
    if importlib.util.find_spec("kvikio") is None:
        extra = "gds-cu13" if (torch.version.cuda or "13").startswith("13") else "gds"
        return Probed(why_not=f"KvikIO is not installed: pip install 'elastrain[{extra}]'")
    if not torch.cuda.is_available():
        return Probed(why_not="this process sees no CUDA device, and KvikIO moves CUDA tensors only")
    why_not = ""
    for way, variables in WAYS.items():
        command = [sys.executable, "-c", f"from {__name__} import measure; measure()", directory, str(size_bytes)]
        environment = {**os.environ, **variables}
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment
            )
        except subprocess.TimeoutExpired:
            return Probed(why_not=f"KvikIO did not move {size_bytes} bytes within {timeout_s} s: look at the driver")
        if not ran.returncode:
            return Probed(moved_by=way, **json.loads(ran.stdout.splitlines()[-1]))
        lines = ran.stderr.strip().splitlines()
        why_not = f"KvikIO failed: {lines[-1] if lines else f'exit status {ran.returncode}'}"
    return Probed(why_not=why_not)


def measure() -> None:
    """Move bytes by KvikIO and by our own copies, and print the seconds of both. The main function of a probe."""
    size_bytes = int(sys.argv[2])
    there = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device="cuda")
    back, pinned = torch.zeros_like(there), torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    kvikio: Any = import_module("kvikio")
    slab, host = PosixEngine(sys.argv[1]), bytes_of(pinned.untyped_storage())
    slab.reserve(size_bytes)
    with kvikio.CuFile(slab.path(), "r+") as file:
        for part in (slice(ODD_BYTES), slice(None)):
            began_s, size = time.perf_counter(), there[part].nbytes
            if file.pwrite(there[part], size, 0).get() != size or file.pread(back[part], size, 0).get() != size:
                raise OSError("KvikIO moved fewer bytes than it was given")
            ended_s = time.perf_counter()
            if not torch.equal(there[part], back[part]):
                raise OSError("KvikIO gave back other bytes than it had written")
            back.zero_()
    own_began_s = time.perf_counter()
    pinned.copy_(there)
    slab.write(0, [host])
    slab.read(0, [host])
    back.copy_(pinned)
    torch.cuda.synchronize()
    sys.stdout.write(json.dumps({"seconds": ended_s - began_s, "own_seconds": time.perf_counter() - own_began_s}))


def open_engine(directory: str | os.PathLike[str]) -> IoEngine:
    """Return the faster engine for CUDA memory: KvikIO, or our own copies through pinned memory.

    Raises OffloadConfigError if the probe fails.
    """
    found = probe(directory)
    if found.why_not is not None:
        raise OffloadConfigError(
            f"GPUDirect Storage cannot be used in {os.fspath(directory)}: {found.why_not}; without gds=True, our own "
            "pinned copies move the bytes"
        )
    return GdsEngine(directory, found.moved_by) if found.seconds <= found.own_seconds else PosixEngine(directory)


class GdsEngine:
    """An engine with the slab file of `PosixEngine` that also moves CUDA memory, in a way that `probe` has found."""

    def __init__(self, directory: str | os.PathLike[str], moved_by: str, *, threads: int = 4) -> None:
        self.moved_by = moved_by
        # CPU tensors are moved by `PosixEngine`, because KvikIO would copy them through a buffer of its own.
        self._slab = PosixEngine(directory)
        self.name = self._slab.name
        os.environ |= WAYS[moved_by]  # the libraries read them when they are loaded
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
