"""Makes the backend "elastrain" known to torch.distributed without anybody importing it: an entry point of torch's.

`import torch` calls `autoload`. What raises here would break every `import torch` on the machine, so nothing does; and
nothing heavy is imported before a group of this backend is made. The module stays at the door of `comm`: what was
installed before names it, and an entry point that leads nowhere would break `import torch` as well.
"""

from __future__ import annotations

import logging
from typing import Any

NAME = "elastrain"


def autoload() -> None:
    """Register the backend: torch calls this for the entry point group `torch.backends`."""
    try:
        register()
    except Exception:  # the edge towards torch: see above
        logging.getLogger(__name__).warning("the backend %r is not available to torch.distributed", NAME, exc_info=True)


def register() -> None:
    """Safe to call more than once."""
    from torch.distributed.distributed_c10d import Backend

    if NAME not in Backend.backend_list:
        Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(opts: Any, options: Any) -> Any:
    from elastrain.comm.torch_backend import bootstrap

    return bootstrap.create(opts, options)
