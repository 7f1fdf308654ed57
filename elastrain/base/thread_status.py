"""Where a thread of a worker is, as values: what a worker's page of whereabouts says, and what its agent judges."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Station(IntEnum):
    """Where a thread is, as far as others care: whether they wait for it."""

    OUTSIDE = 0
    """Not in the steps of a job: it has not come there yet, or has left."""
    WAITING = 1
    """For others: it owes nothing."""
    COMPUTING = 2
    """In a micro-batch."""
    BETWEEN = 3
    """In the script's own code between two steps."""
    DECLARED = 4
    """In something that has a name and a bound of its own."""
    TURNING = 5
    """The engine's thread, which comes round at least twice a second."""


@dataclass(frozen=True, kw_only=True)
class ThreadStatus:
    """What one thread has said last. `count` changes with each move; equal counts are one and the same moment."""

    count: int = 0
    place: Station = Station.OUTSIDE
    thread: int = 0
    """Its id in the kernel; 0 before it has moved."""
    step: int = -1
    allowed_s: float = 0.0
    """How long it may stay there; 0: what is usual there."""
    name: str = ""
    """Of a declared stretch; of what the engine did last."""
