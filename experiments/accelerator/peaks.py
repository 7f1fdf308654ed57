"""The most bytes that a process has held on its device, whoever makes the allocator's peak begin anew meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class HighestPeak:
    """A counter that is put in front of `reset_peak_memory_stats` of torch's module of a device."""

    def __init__(self, device: str) -> None:
        self._module: Any = torch.get_device_module(device)
        self._reset: Callable[..., None] = self._module.reset_peak_memory_stats
        self._bytes = 0
        self._module.reset_peak_memory_stats = self._look_and_reset

    def _look_and_reset(self, *device: object) -> None:
        self.bytes()
        self._reset(*device)

    def bytes(self) -> int:
        """Return the most bytes so far."""
        self._bytes = max(self._bytes, int(self._module.max_memory_allocated()))
        return self._bytes

    def write(self, path: Path) -> None:
        """Add the bytes to a member's facts, as a line of their own."""
        with path.open("a") as file:
            file.write(json.dumps({"highest_bytes": self.bytes(), "races": [], "descriptors": 0}) + "\n")
