"""State of Python, NumPy and torch while data is loaded: seeds, generators of the loop, and the default device."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from elastrain.device import DevicePort
from elastrain.device.same_memory import HOST


def seed_all(key: int, port: DevicePort = HOST) -> None:
    """Seed the default generators, and that of a device that the port belongs to."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)
    if not port.is_host:
        port.manual_seed(key)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the default generators of the CPU unchanged."""
    kept = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.default_generator.set_state(kept[2])


def in_host_memory(load: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    """Return `load` without the script's default device, which a fork cannot use."""

    def loaded(step: int, micro_batch: int) -> Any:
        with torch.device("cpu"):
            return load(step, micro_batch)

    return loaded
