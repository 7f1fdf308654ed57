"""Step times, memory and copies of a loop of the training script: a plain one, or that of a member of a job."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from elastrain.device import DeviceEvent, device_of
from experiments.accelerator.meter import NoMeter
from experiments.accelerator.models import WARM, Training
from tests.gpu.copies import Copies

MEET_S = 60.0


class Timing(NoMeter):
    """Figures that the training script tells of its steps. `close` writes a line with the figures."""

    def __init__(self, path: Path, training: Training) -> None:
        self._path, self._training = path, training
        self._port = device_of(torch.device(training.device))
        self._port.reset_peak_memory_stats()
        self._before = self._port.memory_allocated()[0]
        self._host_before = host_bytes(forget_peak=True)
        self._copies = Copies(self._port) if training.copies else None
        self._mark: DeviceEvent | None = None
        self._began_s = 0.0

    def begin_step(self, number: int) -> None:
        """Begin to time if this is the first step that counts."""
        if number == WARM:
            self._port.synchronize()
            if self._training.beside > 1:
                meet(self._path.parents[3], self._training.beside)
            self._began_s = time.perf_counter()
            if self._copies is not None:
                self._copies.begin()

    def begin(self) -> None:
        """Mark the begin of a micro-batch."""
        self._mark = self._copies and self._copies.mark()

    def end(self) -> None:
        """Mark the end of a micro-batch."""
        if self._copies is not None and self._mark is not None:
            self._copies.computed(self._mark)

    def close(self) -> None:
        """Wait for the device, and write the figures."""
        self._port.synchronize()
        steps = self._training.steps - WARM
        found: dict[str, Any] = {
            "step_s": (time.perf_counter() - self._began_s) / steps,
            "steps": steps,
            "peak_bytes": self._port.memory_allocated()[1] - self._before,
            "host_bytes": host_bytes() - self._host_before,
        }
        found |= self._copies.figures(steps) if self._copies is not None else {}
        with self._path.open("a") as lines:
            lines.write(json.dumps(found) + "\n")


def host_bytes(*, forget_peak: bool = False) -> int:
    """Return the peak of this process's resident memory; or forget it, and return what is resident now."""
    if forget_peak:
        Path("/proc/self/clear_refs").write_text("5")
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS" if forget_peak else "VmHWM"].split()[0]) << 10


def meet(folder: Path, count: int) -> None:
    """Wait for the other processes, so that all are timed at the same time."""
    (folder / f"ready-{os.getpid()}").touch()
    until_s = time.monotonic() + MEET_S
    while len(list(folder.glob("ready-*"))) < count and time.monotonic() < until_s:
        time.sleep(0.005)
