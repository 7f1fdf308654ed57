"""Communication between members: collectives over shared memory and authenticated links.

There are five folders. Each may import the folders above it in this list, and `errors`:

    shm            shared memory, tensors in it, and the proof that another process has ended
    wire           authenticated links to the members of a view, and the frames on them
    collectives    rounds and order of summation of each collective, without threads and sockets
    groups         execution of collectives: in shared memory on one host, by messages between hosts
    torch_backend  the backend "elastrain" of `torch.distributed`

The names in `__all__` are for users of `torch.distributed`. They are imported on first use: the launcher uses parts of
`shm` and `wire` without torch, so neither this file nor the `__init__.py` of a folder may import torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from elastrain.comm.autoload import autoload

if TYPE_CHECKING:
    from elastrain.comm.torch_backend.bootstrap import Options
    from elastrain.comm.torch_backend.survival import surviving
    from elastrain.comm.torch_backend.view_change import handle, monitored_barrier, reconfigure

__all__ = ["Options", "handle", "monitored_barrier", "reconfigure", "surviving"]

_HOMES = {
    "Options": "torch_backend.bootstrap",
    "handle": "torch_backend.view_change",
    "monitored_barrier": "torch_backend.view_change",
    "reconfigure": "torch_backend.view_change",
    "surviving": "torch_backend.survival",
}

if "torch.distributed.distributed_c10d" in sys.modules:
    autoload()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found
