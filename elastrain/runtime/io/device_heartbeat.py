"""The work of a member's device, published for the agent that watches it.

A member computes until all work that it has submitted to its device has landed, also while its loop waits for others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from elastrain.base.thread_status import Station

if TYPE_CHECKING:
    from elastrain.comm.shm.heartbeat_page import Trail
    from elastrain.device import DevicePort


class DeviceWork(NamedTuple):
    """Work of the device: the step, and the place in the script from which it was submitted."""

    place: Station
    step: int
    allowed_s: float
    """Time that the device may take, if the script declared a phase before; else 0."""
    micro_batch: int | None = None
    """The micro-batch in which it was submitted, if it was in one."""


class DeviceHeartbeat:
    """The heartbeat of the device, for any thread. It does nothing until `watch` names an accelerator.

    `whence` returns what the page says of work that is submitted now.
    """

    def __init__(self, whence: Callable[[], DeviceWork]) -> None:
        self._whence = whence
        self._trail: Trail | None = None
        self._name = ""
        self._pending: deque[DeviceWork] = deque()
        self._lock = threading.Lock()

    def watch(self, port: DevicePort, trail: Trail) -> None:
        """Publish the device's work from now on. Has no effect for the host, whose work lands when it is submitted."""
        if port.is_host:
            return
        told = port.describe()
        self._name = f"{port.device} ({', '.join(filter(None, (told.name, told.uuid)))})"
        self._trail = trail
        trail.move(Station.WAITING, name=self._name)

    def submitted(self) -> None:
        """Note work that the device has to finish. Call `landed` once for it, unless the device fails."""
        if self._trail is None:
            return
        with self._lock:
            self._pending.append(self._whence())
            # Work behind other work is no sign of life.
            if len(self._pending) == 1:
                self._show(self._trail)

    def landed(self) -> None:
        """Publish that the device has finished the oldest work. For the thread that waited for it."""
        if self._trail is None:
            return
        with self._lock:
            self._pending.popleft()
            self._trail.thread = threading.get_native_id()
            self._show(self._trail)

    @property
    def oldest(self) -> DeviceWork | None:
        """The oldest work that is not known to have landed. A device that fails has failed there or behind it."""
        with self._lock:
            return self._pending[0] if self._pending else None

    @property
    def is_computing(self) -> bool:
        """True until all work has landed."""
        return bool(self._pending)

    def _show(self, trail: Trail) -> None:
        """Publish the oldest work, because the device finishes its work in about the order of the submissions."""
        oldest = self._pending[0] if self._pending else DeviceWork(Station.WAITING, -1, 0.0)
        trail.move(oldest.place, step=oldest.step, allowed_s=oldest.allowed_s, name=self._name)
