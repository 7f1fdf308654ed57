"""Device memory of a worker that its peers read in place, as a training asks for it."""

from __future__ import annotations

from elastrain.device import device_sharing as sharing
from elastrain.device.sharing_probe import ReadableDevices
from elastrain.runtime.carrying import in_place
from experiments.accelerator.models import Training

ROOM_BYTES = 32 << 10
"""Memory that a member shares at the most where there is little room: less than it sends in a step."""


def share_device_memory(training: Training) -> None:
    """Let this process share its device's memory as the training says. Otherwise everything is carried."""
    if not training.shared:
        sharing.PROVIDERS.clear()
    elif training.device == "late":
        from tests.support import late
        from tests.support.late import sharing as late_sharing

        late_sharing.set_up()
        if training.shared == "cramped":
            late.configure(shareable_bytes=ROOM_BYTES)
    if training.shared in ("trusted", "cramped"):
        in_place.probe = lambda provider, index, limit_s: ReadableDevices(readable=(index,))  # type: ignore[assignment]
