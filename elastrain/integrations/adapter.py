"""The checks of all adapters: a library in a version that they know, and at most one adapter in a process."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import torch

from elastrain.errors import ConfigError

_claimed: str | None = None
"""The adapter that this process uses, once it uses one."""


def require(library: str, minimum: str) -> ModuleType:
    """Import the adapter's library and return it.

    Args:
        library: Name of the package, which is also the name of its module.
        minimum: The oldest version that the adapter works with, such as "1.15".

    Raises:
        ConfigError: The library is not installed, or it is too old.
    """
    try:
        found = version(library)
    except PackageNotFoundError:
        raise ConfigError(
            f"elastrain.integrations.{library} needs the package {library}: pip install '{library}>={minimum}'"
        ) from None
    if _numbers(found) < _numbers(minimum):
        raise ConfigError(
            f"elastrain.integrations.{library} needs {library} {minimum} or newer, and {found} is installed: "
            f"pip install '{library}>={minimum}'"
        )
    return import_module(library)


def claim(adapter: str) -> None:
    """Note that this process uses the adapter. Raises ConfigError if it uses another one already.

    Args:
        adapter: Name of the adapter's class with its module, such as "elastrain.integrations.accelerate.Accelerator".
    """
    global _claimed
    if _claimed not in (None, adapter):
        raise ConfigError(
            f"this process uses {_claimed} already, and {adapter} would be a second job in it: use one adapter in a "
            "script"
        )
    _claimed = adapter


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading whole numbers of a version: (5, 23, 0) of "5.23.0.dev1"."""
    found: list[int] = []
    for part in text.split("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


def current_device(*, cpu: bool = False) -> torch.device:
    """Return the device that the job has chosen for this worker: the current accelerator's, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() and not cpu else None
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())
