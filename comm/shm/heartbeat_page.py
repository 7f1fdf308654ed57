"""Where the threads of a process are, in the page of its beacon: written as they go, read from outside at any time.

A thread that is stopped, or waits for an interpreter lock that somebody holds, can tell nobody; that its count stands
still does. Whoever has the beacon's descriptor reads along. Torch may never come in: the launcher uses this too.
"""

from __future__ import annotations

import signal
import struct
import threading
from enum import IntEnum

from elastrain.base.thread_status import Station, ThreadStatus
from elastrain.comm.shm.shared_memory import Mapping

STACKS_SIGNAL = signal.SIGRTMAX - 3
"""At which a process that leaves a trail writes down its stacks. It would end any other."""
_FIRST_BYTES, _EACH_BYTES, _NAME_BYTES = 1024, 256, 64
_SPOT = struct.Struct(f"<qqqqd{_NAME_BYTES}s")
_COUNT = struct.Struct("<q")


class Lane(IntEnum):
    """Which thread."""

    LOOP = 0
    ENGINE = 1


class Trail:
    """One thread's own end: `move` and `beat` from that thread only."""

    def __init__(self, page: Mapping, lane: Lane) -> None:
        self._page = page  # keeps the memory that is written to
        self._at = page.view(_FIRST_BYTES + lane * _EACH_BYTES, _SPOT.size)
        self._count = 0
        self._thread = 0

    def move(self, place: Station, *, step: int = -1, allowed_s: float = 0.0, name: str = "") -> None:
        """It is there from now on. A longer name is cut."""
        self._count += 1
        self._thread = self._thread or threading.get_native_id()
        # Read in the middle of a write it looks like a move; the next look has it whole.
        text = name.encode()[:_NAME_BYTES]
        _SPOT.pack_into(self._at, 0, self._count, place, self._thread, step, allowed_s, text)

    def beat(self) -> None:
        """It is still there, and goes on."""
        self._count += 1
        _COUNT.pack_into(self._at, 0, self._count)


def read(page: Mapping, lane: Lane) -> ThreadStatus:
    """What the thread has said. What no thread writes there reads as OUTSIDE: the page belongs to another process."""
    count, place, thread, step, allowed_s, name = _SPOT.unpack(
        page.view(_FIRST_BYTES + lane * _EACH_BYTES, _SPOT.size).tobytes()
    )
    known = Station(place) if place in Station._value2member_map_ else Station.OUTSIDE
    text = name.rstrip(b"\0").decode(errors="replace")
    return ThreadStatus(count=count, place=known, thread=thread, step=step, allowed_s=allowed_s, name=text)
