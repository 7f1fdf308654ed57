"""Small values of a device that the training loop's thread reads: those of one step together, with one wait."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Read = Callable[[Tensor], object]
"""A function that takes the bytes of values, as a 1-D tensor of uint8 in host memory."""


class DeviceReads:
    """Values that are to be read, and the functions that take them."""

    def __init__(self) -> None:
        self._asked: list[tuple[Tensor, Read]] = []

    def ask(self, values: Tensor, read: Read) -> None:
        """Call `read` with the bytes of the values: now if they lie in host memory, otherwise in `fetch`.

        `values`: a contiguous tensor that nothing changes before `fetch`.
        """
        raw = values.reshape(-1).view(torch.uint8)
        if raw.device.type == "cpu":
            read(raw)
        else:
            self._asked.append((raw, read))

    def fetch(self) -> None:
        """Wait once for each device that values were asked of, and call the functions, in the order of `ask`."""
        asked, self._asked = self._asked, []
        for device in dict.fromkeys(raw.device for raw, _ in asked):
            same = [(raw, read) for raw, read in asked if raw.device == device]
            found = torch.cat([raw for raw, _ in same]).cpu()
            for part, (_, read) in zip(torch.split(found, [raw.numel() for raw, _ in same]), same, strict=True):
                read(part)
