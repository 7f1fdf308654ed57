"""Registration of the backend "elastrain" with torch.distributed, by an entry point that `import torch` calls.

An exception here would break every `import torch` on the machine, so `autoload` raises nothing. No heavy module is
imported until a group of this backend is made. This file must keep its place: packages installed earlier name it as
their entry point, and an entry point without a target would break `import torch` as well.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
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
        # Only for kinds with a default backend: torch would make this one the default of all others.
        Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        Backend.backend_capability[NAME] = _Devices(["cpu", "cuda"])


class _Devices(list[str]):
    """Kinds of devices of the backend. Torch lists them for each group: with the accelerator that it then knows.

    Packages of other accelerators name them when they are imported, which may be later than the registration.
    """

    def __iter__(self) -> Iterator[str]:
        import torch

        yield from dict.fromkeys([*super().__iter__(), torch._C._get_accelerator().type])


def _create(opts: Any, options: Any) -> Any:
    from elastrain.comm.torch_backend import bootstrap

    return bootstrap.create(opts, options)
