"""The time of a micro-batch, measured where it is computed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastrain.device import DeviceEvent, DevicePort
    from elastrain.runtime.io.heartbeat import LoopHeartbeat


class MicroBatchTimer:
    """A timer for the loop's thread, which never waits for the device.

    The device's time lies between two events in the loop's stream. A loop that only launches work is sooner done. The
    timer tells `LoopHeartbeat.computed` once the device has reached the second event: on the host at once, on a device
    from the landing thread, perhaps after the commit of the step.
    """

    def __init__(self, port: DevicePort, whereabouts: LoopHeartbeat) -> None:
        self._port = port
        self._whereabouts = whereabouts
        self._began: DeviceEvent | None = None

    def begin(self) -> None:
        """Start the time of a micro-batch. A micro-batch that has no end, because it is computed again, has no time."""
        self._began = self._port.record(timing=True)

    def end(self) -> None:
        """End the time, and let the landing of the micro-batch tell it."""
        assert self._began is not None
        began, ended = self._began, self._port.record(timing=True)
        self._whereabouts.device.submitted()
        ended.then(partial(self._landed, began, ended))

    def _landed(self, began: DeviceEvent, ended: DeviceEvent, error: Exception | None) -> None:
        if error is None:
            self._whereabouts.device.landed()
            self._whereabouts.computed(began.elapsed_s(ended))
