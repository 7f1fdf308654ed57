"""The errors that users meet, named by what they can do next.

ElastrainError
├── ConfigError      fix the input and start again (bad flag, bad batch size, unsuitable optimizer)
│   └── CutError     the model has not the cuts that its stages need: ask for fewer, or change the model
├── RefusedError     this process may not join (other spec, torch version, thread count, secret): start the right one
├── NoRoomError      the plan does not fit the memory limit, whatever leaves: raise it, or start with more members
├── DriveFailedError this member's drive failed: it ends, the others go on; look at that drive
├── CorruptedError   this member's memory or device is wrong: it ends, the others go on; look at that machine
├── StateLostError   every holder of some shard died: restart from a durable checkpoint
├── DivergedError    what must be equal differs and nobody's replacement mends it, or settings differ: stop and look
└── StoppedError     the job was ended from outside (operator, launcher gone)
"""

from __future__ import annotations

# One class per thing that a caller can do next, and none per thing that can go wrong: the message says what did.


class ElastrainError(Exception):
    """Root of everything that elastrain raises on purpose."""


# Also a ValueError: callers that know nothing of this package catch bad arguments by that name.
class ConfigError(ElastrainError, ValueError):
    """The input is wrong. The message says what was expected, what came, and what to do."""


class CutError(ConfigError):
    """The model cannot be cut into so many stages. The message has the legal cuts and what forbids others."""


class RefusedError(ElastrainError):
    """This process may not join the job. The message names the differing setting and both values."""


class NoRoomError(ElastrainError):
    """A member cannot hold what its plan asks of it. The message says how much memory is missing."""


class DriveFailedError(ElastrainError):
    """A member's drive does not take or give back what is kept on it. The member ends; the others have its state."""


# Apart from DivergedError, because only one of the two ends the job: here the others are known to be right.
class CorruptedError(ElastrainError):
    """What this member holds is wrong, as a comparison showed. The member ends; the others have the right bits."""


class StateLostError(ElastrainError):
    """All holders of at least one shard are gone. Nothing is invented: the job ends with this."""


class DivergedError(ElastrainError):
    """State that must be equal is not. The job ends on all nodes with this: going on could keep wrong bits."""


class StoppedError(ElastrainError):
    """The job was stopped from outside; nothing is wrong with this process."""
