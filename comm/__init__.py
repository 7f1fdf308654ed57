"""See docs/index.md for what lives in this room. What users of torch.distributed need is offered here by name.

The launcher imports parts of this room without torch: nothing here may import it before it is asked for.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastrain.comm.autoload import autoload

if TYPE_CHECKING:
    from elastrain.comm.survival import surviving
    from elastrain.comm.torch_backend import Options
    from elastrain.comm.torch_view import handle, monitored_barrier, reconfigure

__all__ = ["Options", "handle", "monitored_barrier", "reconfigure", "surviving"]

_HOMES = {
    "Options": "torch_backend",
    "handle": "torch_view",
    "monitored_barrier": "torch_view",
    "reconfigure": "torch_view",
    "surviving": "survival",
}

if "torch.distributed.distributed_c10d" in sys.modules:
    autoload()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found
