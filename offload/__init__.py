"""Offloading of training state to SSDs: data leaves memory and comes back with the same bits.

`save_on_disk` moves saved activations out between forward and backward:

    offload = elastrain.offload.save_on_disk(dirs=["/ssd"], memory_limit=4 << 30)
    for batch in loader:
        with offload:
            loss = model(batch)
        loss.backward()

`within` also moves parameters, gradients and optimizer state:

    training = elastrain.offload.within(model, optimizer, dirs=["/ssd"], memory_limit=8 << 30)
    for batch in loader:
        model(batch).backward()
        training.step(max_grad_norm=1.0)

Names are imported on first use, so that `elastrain offload show` can read profiles without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastrain.offload.activations.hooks import ActivationOffload, OffloadConfig, save_on_disk
    from elastrain.offload.errors import (
        CorruptSpillError,
        LimitTooSmallError,
        ModifiedInPlaceError,
        OffloadConfigError,
        OffloadError,
        PieceLostError,
        SpillReadError,
        SpillWriteError,
    )
    from elastrain.offload.lifetimes.recorder import StepRecorder
    from elastrain.offload.lifetimes.within import TrainingWithin, within
    from elastrain.offload.planning.profile import DeviceStats, Lifetime, OffloadStats, PassProfile, Path, StorageBytes

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
    "PieceLostError",
    "SpillReadError",
    "SpillWriteError",
    "StepRecorder",
    "StorageBytes",
    "TrainingWithin",
    "save_on_disk",
    "within",
]


_HOOKS = ("ActivationOffload", "OffloadConfig", "save_on_disk")
_WITHIN = ("TrainingWithin", "within")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'elastrain.offload' has no attribute {name!r}")
    home = "errors" if name.endswith("Error") else "activations.hooks" if name in _HOOKS else "planning.profile"
    home = "lifetimes.within" if name in _WITHIN else "lifetimes.recorder" if name == "StepRecorder" else home
    return getattr(import_module(f"elastrain.offload.{home}"), name)
