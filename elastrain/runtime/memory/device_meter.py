"""The meter of what this process holds on a device."""

from __future__ import annotations

from collections.abc import Callable

from elastrain.device.port import DevicePort
from elastrain.runtime.memory.process_memory import Peak


class DeviceMeter:
    """A meter of the peak of this process's tensors on a device. It makes the port's own peak begin anew.

    Accounted bytes may be freed within a step, as states are that another member takes over. So each mark compares the
    peak since the one before it with what was accounted for at both. The engine's thread uses it.

    Args:
        port: The device.
        accounted_bytes: Returns the bytes on the device that are accounted for now.
    """

    def __init__(self, port: DevicePort, accounted_bytes: Callable[[], int] = lambda: 0) -> None:
        self._port = port
        self._accounted = accounted_bytes
        self._accounted_bytes = self._peak_bytes = self._besides_bytes = 0
        self.take()

    def look(self) -> None:
        """Do nothing, because the device's allocator counts every allocation."""

    def mark(self) -> None:
        """Add the peak since the last mark to that of the step. Call it before accounted bytes are freed."""
        _, peak_bytes = self._port.memory_allocated()
        self._port.reset_peak_memory_stats()
        before_bytes, self._accounted_bytes = self._accounted_bytes, self._accounted()
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        besides_bytes = peak_bytes - max(before_bytes, self._accounted_bytes)
        self._besides_bytes = max(self._besides_bytes, besides_bytes)

    def take(self) -> Peak:
        """Return the peak since the last call, and start the next one."""
        self.mark()
        peak_bytes, besides_bytes = self._peak_bytes, self._besides_bytes
        self._peak_bytes = self._besides_bytes = 0
        return Peak(least_bytes=peak_bytes, most_bytes=peak_bytes, besides_bytes=besides_bytes)

    @property
    def now_bytes(self) -> int:
        """Bytes of this process's tensors on the device."""
        return self._port.memory_allocated()[0]
