"""Events, and the threads that call functions when a device has reached them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

Called = Callable[[Exception | None], None]
"""A function that is called once, with None when an event is reached, or with the device's error."""


class DeviceEvent:
    """A place in a stream. It is reached once the device has finished all work before it. Any thread may use it."""

    __slots__ = ("_current_stream", "_event", "_landing")

    def __init__(self, event: Any, current_stream: Callable[[], Any], landing: LandingThread | None) -> None:
        """Keep an event with the methods of torch's, and the thread for calls; None: its events are always reached."""
        self._event, self._current_stream, self._landing = event, current_stream, landing

    def query(self) -> bool:
        """Return True if the event is reached. Does not wait. Raises the device's error."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Wait in the calling thread until the event is reached. Raises the device's error."""
        self._event.synchronize()

    def wait(self, stream: Any = None) -> None:
        """Let later work of a stream (None: the calling thread's current one) wait for the event. No thread waits."""
        self._event.wait(stream or self._current_stream())

    def then(self, call: Called) -> None:
        """Call a function once the event is reached, or with the device's error.

        The host calls it at once, other devices from a thread of the port. That thread makes the calls for one kind of
        event (recorded, copied out, copied in) in the order of `then`. So the function must not wait for the device.
        """
        if self._landing is None:
            call(None)
        else:
            self._landing.then(self, call)

    def elapsed_s(self, end: DeviceEvent) -> float:
        """Return the device's time in seconds from this event to a later one of the same device.

        Raises ValueError if one was recorded without `timing=True`, and RuntimeError if one is not reached.
        """
        return float(self._event.elapsed_time(end._event)) / 1000


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
