"""Positions of a process's threads in the page of its beacon: each thread writes its own, other processes read them.

The device has a record, too, which tells what it has to finish. A thread that is stopped, or waits for the interpreter
lock, cannot report that. Its counter stands still, and a reader sees this. A reader needs the beacon's descriptor. This
module never imports torch, because the launcher uses it.
"""

from __future__ import annotations

import signal
import struct
import threading
from enum import IntEnum

from elastrain.base.thread_status import Station, ThreadStatus
from elastrain.comm.shm.shared_memory import Mapping

STACKS_SIGNAL = signal.SIGRTMAX - 3
"""Signal at which a process with trails writes its stacks to a file. It ends any other process."""
_FIRST_BYTES, _EACH_BYTES, _NAME_BYTES = 1024, 256, 96
_SPOT = struct.Struct(f"<qqqqd{_NAME_BYTES}s")
_COUNT = struct.Struct("<q")


class Lane(IntEnum):
    """Thread that a record in the page belongs to, or the process's device."""

    LOOP = 0
    ENGINE = 1
    DEVICE = 2


class Trail:
    """Writer of one record. Only its thread may call `move` and `beat`; of the device's, one thread at a time."""

    def __init__(self, page: Mapping, lane: Lane) -> None:
        self.thread = 0
        """Kernel's id of the thread that moves, whose waits for a processor excuse a standstill."""
        self._page = page  # keeps the mapping alive
        self._at = page.view(_FIRST_BYTES + lane * _EACH_BYTES, _SPOT.size)
        self._count = 0

    def move(self, place: Station, *, step: int = -1, allowed_s: float = 0.0, name: str = "") -> None:
        """Record that the thread is now at `place`. A name longer than 96 bytes is cut."""
        self._count += 1
        self.thread = self.thread or threading.get_native_id()
        # A reader may see half of a write, which looks like a move. The next look sees all of it.
        text = name.encode()[:_NAME_BYTES]
        _SPOT.pack_into(self._at, 0, self._count, place, self.thread, step, allowed_s, text)

    def beat(self) -> None:
        """Record that the thread makes progress at the same place."""
        self._count += 1
        _COUNT.pack_into(self._at, 0, self._count)


def read(page: Mapping, lane: Lane) -> ThreadStatus:
    """Return the thread's record from the page.

    A record that no thread has written reads as OUTSIDE, because the page belongs to another process.
    """
    count, place, thread, step, allowed_s, name = _SPOT.unpack(
        page.view(_FIRST_BYTES + lane * _EACH_BYTES, _SPOT.size).tobytes()
    )
    known = Station(place) if place in Station._value2member_map_ else Station.OUTSIDE
    text = name.rstrip(b"\0").decode(errors="replace")
    return ThreadStatus(count=count, place=known, thread=thread, step=step, allowed_s=allowed_s, name=text)
