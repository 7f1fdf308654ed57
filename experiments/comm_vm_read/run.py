"""A peer's ordinary tensor: read by `process_vm_readv`, or staged in shared memory?

`python -m experiments.comm_vm_read.run [--json]`. Forked processes, all at work at once, each with the tensor of its
right neighbour. Nothing of the communicator comes in here.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import struct
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

from elastrain.comm.shm.shared_memory import create_sealed, libc, open_sealed
from experiments.harness import measure_and_print, quantile

SIZES = tuple(256 << 10 << 2 * power for power in range(5))  # 256 KiB to 64 MiB
WORLDS = (2, 4)
BYTES_PER_CASE = 256 << 20
_WAIT_S = 60.0


def read_remote(pid: int, address: int, out: torch.Tensor) -> None:
    """Copy `out.nbytes` bytes at `address` of another process into `out`. Raises OSError where that is not allowed."""
    local = ctypes.create_string_buffer(struct.pack("@QQ", out.data_ptr(), out.nbytes))
    remote = ctypes.create_string_buffer(struct.pack("@QQ", address, out.nbytes))
    one = ctypes.c_ulong(1)
    copied = libc.process_vm_readv(ctypes.c_int(pid), local, one, remote, one, ctypes.c_ulong(0))
    if copied != out.nbytes:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()) or f"{copied} of {out.nbytes} bytes came")


def _live(rank: int, world: int, size_bytes: int, meet: Barrier, addresses: Any, fds: list[int], told: Any) -> None:
    torch.set_num_threads(1)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    numel = size_bytes // 4
    own, out, peer = torch.ones(numel), torch.zeros(numel), (rank + 1) % world
    stage = torch.frombuffer(_mappings[rank].view(0, size_bytes), dtype=torch.float32)
    mapping = open_sealed(fds[peer])
    seen = torch.frombuffer(mapping.view(0, size_bytes), dtype=torch.float32)
    addresses[2 * rank], addresses[2 * rank + 1] = os.getpid(), own.data_ptr()
    meet.wait(_WAIT_S)
    pid, address = addresses[2 * peer], addresses[2 * peer + 1]
    acts: dict[str, Callable[[], Any]] = {
        "stage": lambda: stage.copy_(own),
        "take": lambda: out.copy_(seen),
        "read": lambda: read_remote(pid, address, out),
    }
    for name, act in acts.items():
        act()
        meet.wait(_WAIT_S)
        times_s = []
        for _ in range(max(BYTES_PER_CASE // size_bytes, 5)):
            before_s = time.perf_counter()
            act()
            times_s.append(time.perf_counter() - before_s)
        meet.wait(_WAIT_S)
        told.put((name, quantile(times_s, 0.5)))
    assert bool((out == 1).all())


_mappings: list[Any] = []  # of all ranks, made before the fork: writable for everybody, which only an experiment may do


def case(world: int, size_bytes: int) -> dict[str, float]:
    """Medians over repetitions, then over ranks, of the seconds of one copy of `size_bytes`."""
    fork = multiprocessing.get_context("fork")
    made = [create_sealed("experiment", size_bytes) for _ in range(world)]
    _mappings[:] = [mapping for _, mapping in made]
    meet, told, addresses = fork.Barrier(world), fork.Queue(), fork.Array("Q", 2 * world, lock=False)
    fds = [fd for fd, _ in made]
    members = [
        fork.Process(target=_live, args=(rank, world, size_bytes, meet, addresses, fds, told)) for rank in range(world)
    ]
    for member in members:
        member.start()
    found: dict[str, list[float]] = {}
    for _ in range(3 * world):
        name, seconds = told.get(timeout=_WAIT_S)
        found.setdefault(name, []).append(seconds)
    for member in members:
        member.join(_WAIT_S)
    for fd in fds:
        os.close(fd)
    return {name: quantile(seconds, 0.5) for name, seconds in found.items()}


def measured() -> dict[str, float]:
    """Gigabytes per second of each way, and how many times one read is as fast as staging, by world and size."""
    figures: dict[str, float] = {}
    for world in WORLDS:
        for size_bytes in SIZES:
            seconds = case(world, size_bytes)
            key = f"{world}_{size_bytes >> 10}_KiB"
            figures |= {f"{name}_{key}_GB_per_s": size_bytes / used / 1e9 for name, used in seconds.items()}
            figures[f"read_vs_stage_{key}"] = seconds["stage"] / seconds["read"]
            figures[f"read_vs_stage_and_take_{key}"] = (seconds["stage"] + seconds["take"]) / seconds["read"]
    return figures


if __name__ == "__main__":
    measure_and_print("comm_vm_read", measured, description=__doc__, settings={"worlds": WORLDS, "sizes": SIZES})
