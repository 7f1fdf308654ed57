"""Offload: saved activations on SSD between forward and backward, with the same bits.

offload = elastrain.offload.save_on_disk(dirs=["/ssd"], memory_limit=4 << 30)
for batch in loader:
    with offload:
        loss = model(batch)
    loss.backward()
"""

from elastrain.offload.errors import (
    CorruptSpillError,
    LimitTooSmallError,
    ModifiedInPlaceError,
    OffloadConfigError,
    OffloadError,
    SpillReadError,
    SpillWriteError,
)
from elastrain.offload.hooks import ActivationOffload, OffloadConfig, save_on_disk
from elastrain.offload.stats import DeviceStats, Lifetime, OffloadStats, PassProfile, Path

__all__ = [
    "ActivationOffload",
    "CorruptSpillError",
    "DeviceStats",
    "Lifetime",
    "LimitTooSmallError",
    "ModifiedInPlaceError",
    "OffloadConfig",
    "OffloadConfigError",
    "OffloadError",
    "OffloadStats",
    "PassProfile",
    "Path",
    "SpillReadError",
    "SpillWriteError",
    "save_on_disk",
]
