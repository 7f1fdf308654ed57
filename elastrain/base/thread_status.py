"""Status of a worker's thread or device: values that a worker writes to shared memory, and that its agent judges."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Station(IntEnum):
    """Place of a thread, by what others may expect of it."""

    OUTSIDE = 0
    """Outside of the job's steps: the thread has not entered them yet, or has left them."""
    WAITING = 1
    """Waiting for other members. The thread owes them nothing."""
    COMPUTING = 2
    """In a micro-batch."""
    BETWEEN = 3
    """In the script's own code between two steps."""
    DECLARED = 4
    """In a phase that the script has declared, with a name and a time limit of its own."""
    TURNING = 5
    """In the engine thread's loop, which turns at least twice a second."""


@dataclass(frozen=True, kw_only=True)
class ThreadStatus:
    """The last status that a thread has written. `count` changes with each move; equal counts mean the same moment."""

    count: int = 0
    place: Station = Station.OUTSIDE
    thread: int = 0
    """Thread id in the kernel; 0 before the first move."""
    step: int = -1
    allowed_s: float = 0.0
    """Time that the thread may stay there; 0: the usual bound of this place."""
    name: str = ""
    """Name of the declared phase, of the engine's last action, or of the device."""
