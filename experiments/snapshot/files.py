"""What checkpoints' files cost and catch, without a job: packing, restoring, flipped bits; how long torch blocks."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elastrain.snapshot.durable import state_file, tensor_sections
from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.manifest import MANIFEST
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.reading import Checkpoint
from elastrain.snapshot.shard_state import ShardState
from experiments.harness import ROOT, quantile
from experiments.snapshot.workload import save, states, trained

READ_BYTES = 8 << 20
READERS = 3
"""Members that restore what two have written."""


class NullSink:
    """Takes all and keeps nothing: what is left is the cost of making the bytes."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def write(self, data: memoryview) -> None:
        self.size_bytes += data.nbytes

    def sync(self) -> None: ...

    def commit(self) -> None: ...

    def discard(self) -> None: ...


def packing(all_states: list[ShardState]) -> dict[str, float]:
    """Bytes on disk over bytes in memory, for the whole and by kind; processor seconds per GB to make the bytes."""
    sink = NullSink()
    plain_bytes = sum(state.nbytes for state in all_states)
    began_s = time.thread_time()
    for state in all_states:
        tensor_sections.write(sink, "", *state.pack())
    cost_s = time.thread_time() - began_s
    kinds = {"parameters": [state.parameters for state in all_states]}
    for state in all_states:
        for name, value in state.pieces[0].items():
            if isinstance(value, torch.Tensor) and value.dim():
                kinds.setdefault(name, []).append(value)
    kinds["untouched"] = [torch.zeros_like(all_states[0].parameters)]
    return {
        "packed_ratio": sink.size_bytes / plain_bytes,
        "packed_cost": cost_s / plain_bytes * 1e9,
        **{f"packed_ratio_{kind}": _packed(tensors) for kind, tensors in kinds.items()},
    }


def _packed(tensors: list[torch.Tensor]) -> float:
    sink = NullSink()
    state_file.write(sink, "", b"", [("float32", tensor_sections.bytes_of(tensor)) for tensor in tensors])
    return sink.size_bytes / sum(tensor.nbytes for tensor in tensors)


def restoring(folder: Path, all_states: list[ShardState], rounds: int) -> dict[str, float]:
    """Restore rate onto another number of members, over the drive's read rate measured beside it; the best of each."""
    place = LocalPlace(folder / "restore")
    manifest = save(place, all_states, step=1, writers=2)
    files = [Path(place.location) / manifest.name / file for file in sorted(manifest.files)]
    drive, restored = [], []
    for _ in range(rounds):
        drive.append(_rate(files, lambda: _read_raw(files)))
        restored.append(_restored(place, manifest.name, files))
    return {
        "restore_fraction": quantile([r / d for r, d in zip(restored, drive, strict=True)], 0.5),
        "drive_read_gb_per_s": quantile(drive, 0.5),
        "restore_gb_per_s": quantile(restored, 0.5),
    }


def _forget(files: list[Path]) -> None:
    """Let the kernel's cache drop them."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _rate(files: list[Path], read: Callable[[], None]) -> float:
    _forget(files)
    began_s = time.perf_counter()
    read()
    return sum(file.stat().st_size for file in files) / (time.perf_counter() - began_s) / 1e9


def _read_raw(files: list[Path]) -> None:
    """Past the cache, in several threads: what the drive gives."""

    def work(file: Path, number: int, threads: int) -> None:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        view = memoryview(mmap.mmap(-1, READ_BYTES))
        for offset in range(number * READ_BYTES, file.stat().st_size, threads * READ_BYTES):
            os.preadv(fd, [view], offset)
        os.close(fd)

    threads = [threading.Thread(target=work, args=(file, number, 2)) for file in files for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _restored(place: LocalPlace, name: str, files: list[Path]) -> float:
    """GB/s of uncompressed bytes, from the word to begin until the last member has all its states."""
    _forget(files)
    command = [sys.executable, "-m", "experiments.snapshot.reader", place.location, name]
    processes = [
        subprocess.Popen(
            [*command, str(member), str(READERS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for member in range(READERS)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    began_s = time.perf_counter()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    size_bytes = sum(int(process.stdout.readline()) for process in processes if process.stdout is not None)
    took_s = time.perf_counter() - began_s
    for process in processes:
        process.communicate()
    return size_bytes / took_s / 1e9


def flipping(folder: Path, flips: int) -> dict[str, float]:
    """Bits flipped in every kind of file of a small checkpoint, one at a time, and how many of them are caught."""
    small = [
        ShardState(
            shard=index,
            version=1,
            parameters=torch.randn(40_000),
            pieces=[{"exp_avg": torch.zeros(40_000), "exp_avg_sq": torch.randn(64), "step": torch.tensor(1.0)}],
        )
        for index in range(2)
    ]
    place = LocalPlace(folder / "flips")
    manifest = save(place, small, step=1)
    chance = random.Random(0)
    caught = 0
    for number in range(flips):
        file = MANIFEST if number % 10 == 0 else next(iter(manifest.files))
        path = Path(place.location) / manifest.name / file
        caught += _flip_is_caught(place, manifest.name, path, chance)
    return {"file_flips": flips, "file_flips_caught": caught, "file_flips_missed": flips - caught}


def _flip_is_caught(place: LocalPlace, name: str, path: Path, chance: random.Random) -> bool:
    position, bit = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
    _flip(path, position, bit)
    try:
        problems = Checkpoint.open([place], name).verify()
    except CheckpointError as error:
        problems = [str(error)]
    _flip(path, position, bit)
    return bool(problems)


def _flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ bit]))


def torch_blocks(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Seconds that a training loop waits for torch.save, and for torch.distributed.checkpoint.async_save."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import async_save

    began_s = time.perf_counter()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "whole.pt")
    saved_s = time.perf_counter() - began_s
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        blocked = []
        for number in range(2):  # the first one makes its threads and staging memory
            began_s = time.perf_counter()
            weights, moments = get_state_dict(model, optimizer)
            whole: dict[str, Any] = {"model": weights, "optimizer": moments}
            future = async_save(whole, checkpoint_id=folder / f"dcp-{number}")
            blocked.append(time.perf_counter() - began_s)
            future.result()
    finally:
        dist.destroy_process_group()
    return {"torch_save_s": saved_s, "dcp_async_s": blocked[-1]}


def figures(folder: Path, *, layers: int, rounds: int, flips: int) -> dict[str, float]:
    """All of them. `layers`: of a million parameters each."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    model, optimizer = trained(layers)
    all_states = states(model, optimizer)
    return {
        "parameters": float(sum(p.numel() for p in model.parameters())),
        **packing(all_states),
        **restoring(folder, all_states, rounds),
        **flipping(folder, flips),
    }
