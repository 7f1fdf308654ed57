"""A thread that calls functions when a device has reached their events."""

from __future__ import annotations

import sys
import threading
from queue import SimpleQueue

from elastrain.device.port import Called, DeviceEvent


class LandingThread:
    """A thread that waits for events and calls functions, in the order of the requests. The first request starts it.

    A wait for a device releases the interpreter lock. An event that is never reached holds up all later calls.
    """

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=f"elastrain {name}", daemon=True)
        self._requests: SimpleQueue[tuple[DeviceEvent, Called]] = SimpleQueue()
        self._starting = threading.Lock()

    def then(self, event: DeviceEvent, call: Called) -> None:
        """Call a function once the event is reached: with None, or with the device's error."""
        self._requests.put((event, call))
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    def _run(self) -> None:
        while True:
            _land(*self._requests.get())  # no name here keeps the last call's tensors alive


def _land(event: DeviceEvent, call: Called) -> None:
    error: Exception | None = None
    try:
        event.synchronize()
    except Exception as raised:  # noqa: BLE001 - edge of a thread: the caller gets the device's error
        error = raised
    try:
        call(error)
    except Exception:  # noqa: BLE001 - later calls must not be lost
        threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
