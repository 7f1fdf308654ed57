"""A process that writes a device's memory to a drive, reads it back, and says what moved the bytes.

`python -m tests.gpu.moved DEVICE BYTES FOLDER WAY`. WAY is `kvikio` or `torch`; a device that is no GPU takes our own
copies. The last line of the output is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from elastrain.device import device_of
from elastrain.offload.drives import gds, transfer
from elastrain.offload.drives.device import Device
from elastrain.offload.drives.posix import PosixEngine


def main(device: str, size_bytes: int, folder: Path, way: str) -> None:
    if device == "late":
        from tests.support import late

        late.install()
    port = device_of(torch.device(device))
    given = torch.arange(size_bytes // 8, dtype=torch.int64).to(port.device)
    back = torch.zeros_like(given)
    if way == "torch" and port.device.type == "cuda":
        write_s, read_s, by = _by_torch(given, back, folder / "slab")
    else:
        write_s, read_s, by = _by_engine(given, back, folder)
    found = {"equal": torch.equal(given.cpu(), back.cpu()), "by": by}
    print(json.dumps({**found, "write": size_bytes / write_s / 1e9, "read": size_bytes / read_s / 1e9}))


def _by_engine(given: torch.Tensor, back: torch.Tensor, folder: Path) -> tuple[float, float, str]:
    engine = gds.open_engine(folder) if given.device.type == "cuda" else PosixEngine(str(folder))
    drive, storages = Device(engine, threads=0), [each.untyped_storage() for each in (given, back)]
    ready = transfer.ready_event(storages[0])
    copy, write_s = _timed(lambda: transfer.write(drive, storages[0], ready, lambda: False, kind=""))
    _, read_s = _timed(lambda: transfer.read(drive, copy, storages[1], lambda: False))
    by = drive.stats().moved_by
    drive.close()
    return write_s, read_s, by


def _by_torch(given: torch.Tensor, back: torch.Tensor, path: Path) -> tuple[float, float, str]:
    file = torch.cuda.gds.GdsFile(str(path), os.O_CREAT | os.O_RDWR)
    _, write_s = _timed(lambda: file.save_storage(given.untyped_storage()))
    _, read_s = _timed(lambda: file.load_storage(back.untyped_storage()))
    return write_s, read_s, "torch.cuda.gds"


def _timed(call: Callable[[], object]) -> tuple[object, float]:
    began_s = time.perf_counter()
    found = call()
    return found, time.perf_counter() - began_s


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
