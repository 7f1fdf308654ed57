"""elastrain: elastic, fault-tolerant training for PyTorch.

Lazy on purpose: `elastrain status`, `--help` and the agent's control code start without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastrain.version import __version__ as __version__

# Type checkers see plain imports; at run time a name is imported when it is first used.
if TYPE_CHECKING:
    from elastrain import comm as comm
    from elastrain import offload as offload
    from elastrain.errors import ConfigError as ConfigError
    from elastrain.errors import CorruptedError as CorruptedError
    from elastrain.errors import DivergedError as DivergedError
    from elastrain.errors import DriveFailedError as DriveFailedError
    from elastrain.errors import ElastrainError as ElastrainError
    from elastrain.errors import NoRoomError as NoRoomError
    from elastrain.errors import RefusedError as RefusedError
    from elastrain.errors import StateLostError as StateLostError
    from elastrain.errors import StoppedError as StoppedError
    from elastrain.runtime.job import Job as Job
    from elastrain.runtime.job import init as init
    from elastrain.runtime.loader import DataLoader as DataLoader
    from elastrain.scaling import LossScale as LossScale

_ERRORS = (
    "ConfigError",
    "CorruptedError",
    "DivergedError",
    "DriveFailedError",
    "ElastrainError",
    "NoRoomError",
    "RefusedError",
    "StateLostError",
    "StoppedError",
)
_HOMES = {
    "init": "elastrain.runtime.job",
    "Job": "elastrain.runtime.job",
    "DataLoader": "elastrain.runtime.loader",
    "LossScale": "elastrain.scaling",
    **dict.fromkeys(_ERRORS, "elastrain.errors"),
}
_ROOMS = ("comm", "offload")
"""Those with names for scripts: `elastrain.offload.save_on_disk` works after `import elastrain`."""

__all__ = [
    "ConfigError",
    "CorruptedError",
    "DataLoader",
    "DivergedError",
    "DriveFailedError",
    "ElastrainError",
    "Job",
    "LossScale",
    "NoRoomError",
    "RefusedError",
    "StateLostError",
    "StoppedError",
    "__version__",
    "comm",
    "init",
    "offload",
]


# torch takes seconds to import: commands that only look at a job, and its agents, must not wait for it.
def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"elastrain.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'elastrain' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
