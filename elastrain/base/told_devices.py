"""The accelerators of a node as its agent tells them to a worker at its start, and the choice among them. No I/O."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

CUBLAS_CONFIG, CUBLAS_CONFIG_DEFAULT = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Variable by which cuBLAS computes deterministically, and the value that workers get unless the user has set one."""


@dataclass(frozen=True, kw_only=True)
class ToldDevices:
    """Devices by name and UUID, from earlier workers' reports. The worker need not touch a device to know which it is.

    Both are empty if no worker has reported yet.
    """

    seen: tuple[str, ...] = ()
    """The devices that a worker in this slot sees, by index."""
    left_out: tuple[str, ...] = ()
    """Devices on which no worker is started, because they have failed too often."""

    def as_text(self) -> str:
        """Return the value as text for an environment variable."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> ToldDevices:
        """Return the value of a text; "" if nothing is known. Raises ValueError or TypeError for other text."""
        told = json.loads(text) if text else {}
        return ToldDevices(**{name: tuple(map(str, values)) for name, values in told.items()})

    def name_of(self, index: int) -> str:
        """Return the name of a device, or "" if it is not known."""
        return self.seen[index] if index < len(self.seen) else ""

    def choose(self, count: int, slot: int) -> int | None:
        """Return the index of the device for the worker in this slot, among `count` devices. None: none is left.

        It is the slot modulo the count. If that device is left out, the worker moves to one of the others.
        """
        fit = [index for index in range(count) if self.name_of(index) not in self.left_out]
        if not fit:
            return None
        own = slot % count
        return own if own in fit else fit[slot % len(fit)]
