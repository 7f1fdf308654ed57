"""The loop's state for a member's checkpoints: at the present step, and as it was kept for the checkpoint of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from elastrain.device.finding import device_of
from elastrain.device.landing import DeviceEvent


@dataclass
class AtStep:
    """The loop's tensors and the model's buffers at the present step of the loop."""

    payload: Callable[[], list[Tensor]] = list
    buffers: Mapping[str, Tensor | None] = field(default_factory=dict)
    made: Sequence[DeviceEvent] = ()
    """Events behind the work that makes the buffers."""

    def use_buffers(self, buffers: Mapping[str, Tensor | None]) -> None:
        """Set the buffers, which do not change later. The loop's thread calls it."""
        devices = {buffer.device for buffer in buffers.values() if buffer is not None}
        self.buffers, self.made = buffers, [device_of(device).record() for device in devices]


@dataclass
class KeptLoop:
    """The loop's state for a checkpoint. Its tensors are copied before the script may change them."""

    step: int
    text: str
    payload: Callable[[], list[Tensor]]
    buffers: Mapping[str, Tensor | None]
    """The model's buffers at that step. They do not change later."""
    made: Sequence[DeviceEvent]
    """Events behind the work that makes the buffers."""
    tensors: list[Tensor] | None = None

    def copy(self) -> list[Tensor]:
        """Return copies of the tensors. Raises ConfigError if the script has already changed them."""
        if self.tensors is None:
            self.tensors = self.payload()
        return self.tensors
