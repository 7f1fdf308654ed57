"""elastrain: elastic, fault-tolerant training for PyTorch.

Lazy on purpose: `elastrain status`, `--help` and the agent's control code start without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastrain.runtime.job import Job as Job
    from elastrain.runtime.job import init as init
    from elastrain.runtime.loader import DataLoader as DataLoader
    from elastrain.scaling import LossScale as LossScale

__version__ = "0.1.0"

_HOMES = {
    "init": "elastrain.runtime.job",
    "Job": "elastrain.runtime.job",
    "DataLoader": "elastrain.runtime.loader",
    "LossScale": "elastrain.scaling",
}

__all__ = ["DataLoader", "Job", "LossScale", "__version__", "init"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'elastrain' has no attribute {name!r}")
    return getattr(import_module(home), name)
