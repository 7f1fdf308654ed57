"""The drive: where it is, and what it does by itself: rates of the engine that is measured, in pieces of its size."""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from elastrain.offload import OffloadConfigError
from elastrain.offload.drives.directories import try_directory
from elastrain.offload.drives.host_buffers import lease
from elastrain.offload.drives.posix import PosixEngine

PIECE_BYTES = 8 << 20
THREADS = 2


def spill_directory(parser: argparse.ArgumentParser, given: str | None) -> str:
    """`--dir`, by default the temporary directory. Ends the program in one sentence where nothing can be spilled."""
    directory = given or tempfile.gettempdir()
    try:
        try_directory(directory)
    except OffloadConfigError as unfit:
        parser.error(f"--dir: {unfit}")
    return directory


def measure_disk(directory: Path, size_bytes: int) -> dict[str, float]:
    """GB/s in 8 MiB pieces by two threads over preallocated space, and whether that was direct I/O."""
    engine = PosixEngine(directory)
    engine.reserve(size_bytes)
    pages = [lease(size_bytes=PIECE_BYTES, shift_bytes=0).image for _ in range(THREADS)]
    for page in pages:
        page[:] = os.urandom(PIECE_BYTES)

    def rate(move: Callable[[int, list[memoryview]], None]) -> float:
        def work(number: int) -> None:
            for offset in range(0, size_bytes, PIECE_BYTES)[number::THREADS]:
                move(offset, [pages[number]])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        began_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return size_bytes / (time.perf_counter() - began_s) / 1e9

    rate(engine.write)
    rates = {"write_gb_per_s": rate(engine.write), "read_gb_per_s": rate(engine.read), "direct": float(engine.direct)}
    engine.close()
    return rates
