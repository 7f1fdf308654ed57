"""Results of the training loop, which the engine gets once the device has finished them: once they have landed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from elastrain.device.landing import DeviceEvent
from elastrain.device.port import DevicePort
from elastrain.device.same_memory import HOST

Landed = Callable[[DeviceEvent | None, Exception | None], None]
"""A function that gets the event behind the results, or the device's error. The host has neither."""


class DeviceWatch(Protocol):
    """A count of results that a device has not finished."""

    def submitted(self) -> None:
        """Note that results were submitted. The loop's thread calls it."""

    def landed(self) -> None:
        """Note that the oldest results have landed. Another thread calls it."""


class Landing:
    """The order in which results of the loop land. `watch`: told of each, in a job on a device."""

    def __init__(self, port: DevicePort = HOST, watch: DeviceWatch | None = None) -> None:
        self.port = port
        self._watch = watch
        self._begun = port.record()

    def begin(self) -> None:
        """Let the engine's stream use what the calling thread's stream has made so far."""
        self._begun = self.port.record()

    @contextmanager
    def engine_stream(self) -> Iterator[None]:
        """Make a stream of the engine's thread the current one, behind all work before `begin`."""
        with self.port.side_stream():
            self._begun.wait()
            yield

    def then(self, call: Landed, after: Sequence[DeviceEvent] = ()) -> None:
        """Call a function when all work of the calling thread's current stream has landed. Does not wait.

        The host calls it at once. A device calls it from a thread of its port, in the order of `then`.

        Args:
            call: Function that gets the event; the stream that uses the results has to wait for it.
            after: Events of other streams that have to be reached, too.
        """
        if self.port.is_host:
            call(None, None)
            return
        event = self._behind(after) if after else self.port.record()
        if self._watch is not None:
            self._watch.submitted()
        event.then(lambda error: self._landed(call, event, error))

    def _behind(self, after: Sequence[DeviceEvent]) -> DeviceEvent:
        computed = self.port.record()
        with self.port.side_stream("landing"):
            for event in (computed, *after):
                event.wait()
            return self.port.record()

    def _landed(self, call: Landed, event: DeviceEvent, error: Exception | None) -> None:
        if self._watch is not None and error is None:
            self._watch.landed()
        call(event, error)
