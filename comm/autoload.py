"""Registration of the backend "elastrain" with torch.distributed, by an entry point that `import torch` calls.

An exception here would break every `import torch` on the machine, so `autoload` raises nothing. No heavy module is
imported until a group of this backend is made. This file must keep its place: packages installed earlier name it as
their entry point, and an entry point without a target would break `import torch` as well.
"""

from __future__ import annotations

import logging
from typing import Any

NAME = "elastrain"


def autoload() -> None:
    """Register the backend without raising. torch calls this for the entry point group `torch.backends`."""
    try:
        register()
    except Exception:  # an error must not reach `import torch`: see the module
        logging.getLogger(__name__).warning("the backend %r is not available to torch.distributed", NAME, exc_info=True)


def register() -> None:
    """Register the backend with torch.distributed, unless it is registered already."""
    from torch.distributed.distributed_c10d import Backend

    if NAME not in Backend.backend_list:
        Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(opts: Any, options: Any) -> Any:
    from elastrain.comm.torch_backend import bootstrap

    return bootstrap.create(opts, options)
