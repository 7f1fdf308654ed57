"""The states of one saved storage as a pure table: (state, event) -> (state, commands).

No I/O, no clock, no threads, no tensors. `mover.py` performs the commands in order, and reports what happened as
events. The table has every pair that can happen; a missing pair is a defect of the mover.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """The location of a storage's bytes.

    `MEMORY` lists the states that hold memory, `IN_FLIGHT` those with I/O under way.
    """

    RESIDENT = "resident"  # in memory only
    PINNED = "pinned"  # in memory only, to the end: parts of it may change, which would make a copy outdated
    WRITING = "writing"  # in memory, on its way to disk
    FORWARDED = "forwarded"  # in memory, needed while its write (which may be cancelled) is ending
    SPILLED = "spilled"  # on disk only
    READING = "reading"  # on disk, on its way back
    RELOADED = "reloaded"  # in memory and on disk: memory can be given up at no cost
    FAILED = "failed"  # on disk, but the read failed
    LEAVING = "leaving"  # released; its I/O is still ending
    DROPPED = "dropped"  # gone

    __hash__ = object.__hash__  # faster than Enum's own hash, which is a Python function


MEMORY = frozenset(
    {State.RESIDENT, State.PINNED, State.WRITING, State.FORWARDED, State.READING, State.RELOADED, State.LEAVING}
)
IN_FLIGHT = frozenset({State.WRITING, State.FORWARDED, State.READING, State.LEAVING})


class Event:
    """Something that happened to a storage, or a request for it."""


class Command:
    """Something that the mover must do for a storage."""


@dataclass(frozen=True, kw_only=True)
class Spill(Event):
    """Request of the policy to free the storage's memory. Without a copy on disk, the storage is written first."""


@dataclass(frozen=True, kw_only=True)
class CopyOut(Event):
    """Request for a copy on disk while the memory stays. The memory can then be freed at any moment, at no cost."""


@dataclass(frozen=True, kw_only=True)
class Need(Event):
    """Request of backward for the tensor, now. Repeated after each wait."""


@dataclass(frozen=True, kw_only=True)
class Prefetch(Event):
    """Request to read the tensor, because backward will need it soon."""


@dataclass(frozen=True, kw_only=True)
class Found(Event):
    """Discovery that the original memory is still alive, held by the program."""


@dataclass(frozen=True, kw_only=True)
class WriteDone(Event):
    """End of a write: all bytes are on the device."""


@dataclass(frozen=True, kw_only=True)
class WriteCancelled(Event):
    """Early end of a write, as requested."""


@dataclass(frozen=True, kw_only=True)
class WriteFailed(Event):
    """Failure of a write. The content of the slot is undefined."""


@dataclass(frozen=True, kw_only=True)
class Outdated(Event):
    """Discovery that memory and copy differ, though no version counter changed (`.data`, numpy).

    The memory is right.
    """


@dataclass(frozen=True, kw_only=True)
class ReadDone(Event):
    """End of a read: all bytes are back, and the checksum matches."""


@dataclass(frozen=True, kw_only=True)
class ReadCancelled(Event):
    """Early end of a read, as requested."""


@dataclass(frozen=True, kw_only=True)
class ReadFailed(Event):
    """Failure of a read: the device reported an error or returned other bytes."""


@dataclass(frozen=True, kw_only=True)
class NoMemory(Event):
    """Lack of memory for a read, which was therefore not queued."""


@dataclass(frozen=True, kw_only=True)
class Release(Event):
    """End of the last graph node that may need the storage."""


@dataclass(frozen=True, kw_only=True)
class StartWrite(Command):
    """Command to queue the write."""


@dataclass(frozen=True, kw_only=True)
class CancelWrite(Command):
    """Command to cancel the write. It still reports how it ended."""


@dataclass(frozen=True, kw_only=True)
class StartRead(Command):
    """Command to take memory and queue the read. An urgent read goes before all others."""

    urgent: bool


@dataclass(frozen=True, kw_only=True)
class HastenRead(Command):
    """Command to move the read to the front, because backward waits for it now."""


@dataclass(frozen=True, kw_only=True)
class CancelRead(Command):
    """Command to cancel the read. It still reports how it ended."""


@dataclass(frozen=True, kw_only=True)
class HandBack(Command):
    """Command to give the memory to backward."""


@dataclass(frozen=True, kw_only=True)
class FreeMemory(Command):
    """Command to free the memory."""


@dataclass(frozen=True, kw_only=True)
class FreeSlot(Command):
    """Command to free the space on the device."""


@dataclass(frozen=True, kw_only=True)
class RaiseFault(Command):
    """Command to raise the error with which the read ended."""


Step = tuple[State, tuple[Command, ...]]

_S = State
HAND_BACK = HandBack()
RAISE_FAULT = RaiseFault()
_BOTH = (FreeMemory(), FreeSlot())

TABLE: dict[tuple[State, type[Event]], Step] = {
    (_S.RESIDENT, Spill): (_S.WRITING, (StartWrite(),)),
    (_S.RESIDENT, CopyOut): (_S.FORWARDED, (StartWrite(),)),
    (_S.RESIDENT, Need): (_S.RESIDENT, (HAND_BACK,)),
    (_S.RESIDENT, Release): (_S.DROPPED, (FreeMemory(),)),
    (_S.PINNED, Need): (_S.PINNED, (HAND_BACK,)),
    (_S.PINNED, Release): (_S.DROPPED, (FreeMemory(),)),
    # Forwarding: a storage that is still in memory is handed back from there, and its write is cancelled.
    (_S.WRITING, Need): (_S.FORWARDED, (CancelWrite(), HAND_BACK)),
    (_S.WRITING, WriteDone): (_S.SPILLED, (FreeMemory(),)),
    (_S.WRITING, WriteFailed): (_S.RESIDENT, (FreeSlot(),)),
    (_S.WRITING, Outdated): (_S.RESIDENT, (FreeSlot(),)),
    (_S.WRITING, Release): (_S.LEAVING, (CancelWrite(),)),
    (_S.FORWARDED, Need): (_S.FORWARDED, (HAND_BACK,)),
    (_S.FORWARDED, WriteDone): (_S.RELOADED, ()),  # the cancellation came too late: both copies are good
    (_S.FORWARDED, WriteCancelled): (_S.RESIDENT, (FreeSlot(),)),
    (_S.FORWARDED, WriteFailed): (_S.RESIDENT, (FreeSlot(),)),
    (_S.FORWARDED, Outdated): (_S.RESIDENT, (FreeSlot(),)),
    (_S.FORWARDED, Release): (_S.LEAVING, ()),
    (_S.SPILLED, Need): (_S.READING, (StartRead(urgent=True),)),
    (_S.SPILLED, Prefetch): (_S.READING, (StartRead(urgent=False),)),
    (_S.SPILLED, Found): (_S.RELOADED, ()),
    (_S.SPILLED, Outdated): (_S.RESIDENT, (FreeSlot(),)),
    (_S.SPILLED, Release): (_S.DROPPED, (FreeSlot(),)),
    (_S.READING, Need): (_S.READING, (HastenRead(),)),
    (_S.READING, NoMemory): (_S.SPILLED, ()),
    (_S.READING, ReadDone): (_S.RELOADED, ()),
    (_S.READING, ReadFailed): (_S.FAILED, (FreeMemory(),)),
    (_S.READING, Release): (_S.LEAVING, (CancelRead(),)),
    (_S.RELOADED, Need): (_S.RELOADED, (HAND_BACK,)),
    (_S.RELOADED, Spill): (_S.SPILLED, (FreeMemory(),)),
    (_S.RELOADED, Outdated): (_S.RESIDENT, (FreeSlot(),)),
    (_S.RELOADED, Release): (_S.DROPPED, _BOTH),
    (_S.FAILED, Need): (_S.FAILED, (RAISE_FAULT,)),
    (_S.FAILED, Outdated): (_S.RESIDENT, (FreeSlot(),)),
    (_S.FAILED, Release): (_S.DROPPED, (FreeSlot(),)),
    (_S.LEAVING, WriteDone): (_S.DROPPED, _BOTH),
    (_S.LEAVING, WriteCancelled): (_S.DROPPED, _BOTH),
    (_S.LEAVING, WriteFailed): (_S.DROPPED, _BOTH),
    (_S.LEAVING, Outdated): (_S.DROPPED, _BOTH),
    (_S.LEAVING, ReadDone): (_S.DROPPED, _BOTH),
    (_S.LEAVING, ReadCancelled): (_S.DROPPED, _BOTH),
    (_S.LEAVING, ReadFailed): (_S.DROPPED, _BOTH),
}


class ImpossibleEventError(AssertionError):
    """An event that cannot happen in this state: a defect of the mover."""


def advance(state: State, event: Event) -> Step:
    """Return the next state and the commands.

    `Spill`, `Prefetch` and `Found` are ignored in states where they do nothing.
    """
    step = TABLE.get((state, type(event)))
    if step is not None:
        return step
    if isinstance(event, Spill | Prefetch | Found):
        return state, ()
    raise ImpossibleEventError(f"{type(event).__name__} cannot happen to a storage that is {state.value}")
