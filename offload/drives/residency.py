"""Where one saved storage is, as a pure table: (state, event) -> (state, commands).

No I/O, no clock, no threads, no tensors. The shell in `mover.py` performs the commands, in order, and reports what
happened as events. The table is total over what can happen: a pair that is missing is a defect of the shell.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """Where the bytes are. `holds_memory` and `holds_slot` say what must be given back in the end."""

    RESIDENT = "resident"  # in memory only
    PINNED = "pinned"  # in memory only, to the end: parts of it change on their own, so no copy would be good
    WRITING = "writing"  # in memory, on its way to disk
    FORWARDED = "forwarded"  # wanted while being written: in memory; the write (a cancelled one, it may be) is ending
    SPILLED = "spilled"  # on disk only
    READING = "reading"  # on disk, on its way back
    RELOADED = "reloaded"  # in memory and on disk: memory can be given up at no cost
    FAILED = "failed"  # on disk, and the disk does not give it back
    LEAVING = "leaving"  # nobody needs it any more; I/O on it is still ending
    DROPPED = "dropped"  # gone

    __hash__ = object.__hash__  # a member is one object; Enum's own hash is a call into Python at every look-up


MEMORY = frozenset(
    {State.RESIDENT, State.PINNED, State.WRITING, State.FORWARDED, State.READING, State.RELOADED, State.LEAVING}
)
IN_FLIGHT = frozenset({State.WRITING, State.FORWARDED, State.READING, State.LEAVING})


class Event:
    """Something that happened to one storage, or that somebody asks for."""


class Command:
    """Something that the shell must do for one storage."""


@dataclass(frozen=True, kw_only=True)
class Spill(Event):
    """The policy wants the memory for something else."""


@dataclass(frozen=True, kw_only=True)
class CopyOut(Event):
    """A copy is wanted while the memory stays: it can then be given up at any moment, at no cost."""


@dataclass(frozen=True, kw_only=True)
class Need(Event):
    """Backward asks for the tensor now. Asked again after each wait."""


@dataclass(frozen=True, kw_only=True)
class Prefetch(Event):
    """Backward will ask soon."""


@dataclass(frozen=True, kw_only=True)
class Found(Event):
    """The original memory turned out to be alive still, held by somebody else."""


@dataclass(frozen=True, kw_only=True)
class WriteDone(Event):
    """Every byte is on the device."""


@dataclass(frozen=True, kw_only=True)
class WriteCancelled(Event):
    """The write ended before its end, as asked."""


@dataclass(frozen=True, kw_only=True)
class WriteFailed(Event):
    """The device refused; what the slot contains is undefined."""


@dataclass(frozen=True, kw_only=True)
class Outdated(Event):
    """The memory has other bytes than the copy by now, and no version told (`.data`, numpy): the memory counts."""


@dataclass(frozen=True, kw_only=True)
class ReadDone(Event):
    """Every byte is back and its checksum agrees."""


@dataclass(frozen=True, kw_only=True)
class ReadCancelled(Event):
    """The read ended before its end, as asked."""


@dataclass(frozen=True, kw_only=True)
class ReadFailed(Event):
    """The device gave an error, or other bytes."""


@dataclass(frozen=True, kw_only=True)
class NoMemory(Event):
    """The process has no memory to read it into: the read was not queued."""


@dataclass(frozen=True, kw_only=True)
class Release(Event):
    """The last graph node that could ask for it is gone."""


@dataclass(frozen=True, kw_only=True)
class StartWrite(Command):
    """Queue the write."""


@dataclass(frozen=True, kw_only=True)
class CancelWrite(Command):
    """End the write as soon as possible; it still reports how it ended."""


@dataclass(frozen=True, kw_only=True)
class StartRead(Command):
    """Take memory and queue the read; an urgent one goes before all others."""

    urgent: bool


@dataclass(frozen=True, kw_only=True)
class HastenRead(Command):
    """Somebody waits for this read now: move it to the front."""


@dataclass(frozen=True, kw_only=True)
class CancelRead(Command):
    """End the read as soon as possible; it still reports how it ended."""


@dataclass(frozen=True, kw_only=True)
class HandBack(Command):
    """Give the memory to backward."""


@dataclass(frozen=True, kw_only=True)
class FreeMemory(Command):
    """Let go of the memory."""


@dataclass(frozen=True, kw_only=True)
class FreeSlot(Command):
    """Let go of the space on the device."""


@dataclass(frozen=True, kw_only=True)
class RaiseFault(Command):
    """Raise what the read ended with."""


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
    # Forwarding: what is still in memory is handed back from there, and its write is given up.
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
    """The shell reported an event that cannot happen in this state: a defect of the shell."""


def advance(state: State, event: Event) -> Step:
    """The next state and what to do. Wishes that change nothing in a state (`Spill`, `Prefetch`) are ignored there."""
    step = TABLE.get((state, type(event)))
    if step is not None:
        return step
    if isinstance(event, Spill | Prefetch | Found):
        return state, ()
    raise ImpossibleEventError(f"{type(event).__name__} cannot happen to a storage that is {state.value}")
