"""The communicator, in five wings; each may import those before it, and `errors`, which all raise:

shm            shared memory, the tensors in it, and the proof that another process has ended
wire           authenticated links to the members of a view, and the frames on them
collectives    who sends what in which round, and what is summed in which order: no threads, no sockets
groups         what executes collectives: in shared memory on one host, by messages between hosts
torch_backend  the backend "elastrain" of `torch.distributed`

What users of torch.distributed need is offered here by name. The launcher imports parts of `shm` and `wire` without
torch: neither this file nor a wing's may import torch before it is asked for.
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
