"""Properties of the device that tests can set, in code or in the environment of a process."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from typing import Any

VARIABLE = "LATE"
"""Name of the environment variable that holds settings as JSON, for processes that a test does not start itself."""


@dataclass(kw_only=True)
class Settings:
    """Everything that can be set; `late.configure` changes it while a process runs."""

    capacity_bytes: int = 16 << 30
    name: str = "Late Test Device"
    uuid: str = "late-00000000"
    capability: tuple[int, int] = (1, 0)
    multiprocessors: int = 1
    slowness: float = 1.0
    """Seconds that the device's clock advances for each processor second of a kernel."""
    patience: int = 1
    """Number of times that `Event.query` returns False for work that nothing has waited for."""
    float64: bool = True
    """False: kernels refuse float64, as XPUs without it do."""
    shared: str = ""
    """Name that the devices have in common whose processes read each other's memory in place; "": none is shared."""
    unreadable: bool = False
    """True: no memory of peers can be mapped, so that the probe of shared memory fails."""
    shareable_bytes: int | None = None
    """Bytes of memory that this process may share; None: as much as the device has."""
    raises: bool = True
    """False: races are listed by `late.races()` only."""
    fail_at: int = 0
    """Number of the operation at which the device breaks, counted from the start of the process; 0: never."""
    hang_at: int = 0
    """Number of the operation whose stream never ends; 0: never."""

    def change(self, values: dict[str, Any]) -> None:
        known = {field.name for field in fields(self)}
        if unknown := set(values) - known:
            raise ValueError(f"late has no setting {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
        for name, value in values.items():
            setattr(self, name, tuple(value) if name == "capability" else value)


settings = Settings()
settings.change(json.loads(os.environ.get(VARIABLE, "{}")))
