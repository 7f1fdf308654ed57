"""elastrain: elastic, fault-tolerant training for PyTorch.

Names are imported on first use, so that `elastrain status`, `--help` and the agent start without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastrain.version import __version__ as __version__

# Type checkers see plain imports; at run time a name is imported when it is first used.
if TYPE_CHECKING:
    from elastrain import comm, offload
    from elastrain.errors import (
        ConfigError,
        CorruptedError,
        CutError,
        DivergedError,
        DriveFailedError,
        ElastrainError,
        NoRoomError,
        RefusedError,
        StateLostError,
        StoppedError,
    )
    from elastrain.job.scaling import LossScale
    from elastrain.runtime.job import Job, init
    from elastrain.runtime.loader.loader import DataLoader
    from elastrain.runtime.loader.torch_loader import from_torch
    from elastrain.runtime.loggers.event_files import TensorBoard
    from elastrain.runtime.loggers.jsonl import Jsonl
    from elastrain.runtime.loggers.summary_writer import SummaryWriter
    from elastrain.runtime.loggers.wandb_run import Wandb

_HOMES = {
    "init": "elastrain.runtime.job",
    "Job": "elastrain.runtime.job",
    "DataLoader": "elastrain.runtime.loader.loader",
    "from_torch": "elastrain.runtime.loader.torch_loader",
    "LossScale": "elastrain.job.scaling",
    "Jsonl": "elastrain.runtime.loggers.jsonl",
    "SummaryWriter": "elastrain.runtime.loggers.summary_writer",
    "TensorBoard": "elastrain.runtime.loggers.event_files",
    "Wandb": "elastrain.runtime.loggers.wandb_run",
}
_ROOMS = ("comm", "offload")
"""Packages with names for scripts: `elastrain.offload.save_on_disk` works after `import elastrain`."""

__all__ = [
    "ConfigError",
    "CorruptedError",
    "CutError",
    "DataLoader",
    "DivergedError",
    "DriveFailedError",
    "ElastrainError",
    "Job",
    "Jsonl",
    "LossScale",
    "NoRoomError",
    "RefusedError",
    "StateLostError",
    "StoppedError",
    "SummaryWriter",
    "TensorBoard",
    "Wandb",
    "__version__",
    "comm",
    "from_torch",
    "init",
    "offload",
]


# torch takes seconds to import. Commands that only look at a job, and the agents, must not wait for it.
def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"elastrain.{name}")
    home = "elastrain.errors" if name in __all__ and name.endswith("Error") else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'elastrain' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
