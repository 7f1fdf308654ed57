"""Offload: saved activations on SSD between forward and backward, with the same bits.

offload = elastrain.offload.save_on_disk(dirs=["/ssd"], memory_limit=4 << 30)
for batch in loader:
    with offload:
        loss = model(batch)
    loss.backward()

Lazy on purpose: `elastrain offload show` reads profiles without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastrain.offload.errors import CorruptSpillError as CorruptSpillError
    from elastrain.offload.errors import LimitTooSmallError as LimitTooSmallError
    from elastrain.offload.errors import ModifiedInPlaceError as ModifiedInPlaceError
    from elastrain.offload.errors import OffloadConfigError as OffloadConfigError
    from elastrain.offload.errors import OffloadError as OffloadError
    from elastrain.offload.errors import SpillReadError as SpillReadError
    from elastrain.offload.errors import SpillWriteError as SpillWriteError
    from elastrain.offload.hooks import ActivationOffload as ActivationOffload
    from elastrain.offload.hooks import OffloadConfig as OffloadConfig
    from elastrain.offload.hooks import save_on_disk as save_on_disk
    from elastrain.offload.stats import DeviceStats as DeviceStats
    from elastrain.offload.stats import Lifetime as Lifetime
    from elastrain.offload.stats import OffloadStats as OffloadStats
    from elastrain.offload.stats import PassProfile as PassProfile
    from elastrain.offload.stats import Path as Path

_HOMES = {
    "errors": (
        "CorruptSpillError",
        "LimitTooSmallError",
        "ModifiedInPlaceError",
        "OffloadConfigError",
        "OffloadError",
        "SpillReadError",
        "SpillWriteError",
    ),
    "hooks": ("ActivationOffload", "OffloadConfig", "save_on_disk"),
    "stats": ("DeviceStats", "Lifetime", "OffloadStats", "PassProfile", "Path"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

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


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'elastrain.offload' has no attribute {name!r}")
    return getattr(import_module(f"elastrain.offload.{home}"), name)
