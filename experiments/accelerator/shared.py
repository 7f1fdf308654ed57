"""Device memory of a worker that its peers read in place, as a training asks for it."""

from __future__ import annotations

from elastrain.device import device_sharing as sharing
from elastrain.device.sharing_probe import ReadableDevices
from elastrain.runtime.carrying import in_place
from experiments.accelerator.models import Training


def share_device_memory(training: Training) -> None:
    """Let this process share its device's memory as the training says. Otherwise everything is carried."""
    if not training.shared:
        sharing.PROVIDERS.clear()
    elif training.device == "late":
        from tests.support.late import sharing as late_sharing

        late_sharing.set_up()
    if training.shared == "trusted":
        in_place.probe = lambda provider, index, limit_s: ReadableDevices(readable=(index,))  # type: ignore[assignment]
