"""The errors that users meet, named by what they can do next.

ElastrainError
├── ConfigError      fix the input and start again (bad flag, bad batch size, unsuitable optimizer)
│   └── CutError     the model has too few cuts for its stages: ask for fewer stages, or change the model
├── RefusedError     this process may not join (other spec, torch version, thread count, secret): start the right one
├── NoRoomError      the plan cannot fit the memory limit: raise the limit, or start with more members
├── DriveFailedError this member's drive failed: this member ends, the others go on; look at that drive
├── CorruptedError   this member's memory or device is wrong: it ends, the others go on; look at that machine
├── StateLostError   every holder of some shard died: restart from a durable checkpoint
├── DivergedError    state or settings that must be equal differ, and no member can repair it: stop and look
└── StoppedError     the job was ended from outside (operator, launcher gone)
"""

from __future__ import annotations

# One class for each thing that a caller can do next. Causes have no classes of their own: the message names the cause.


class ElastrainError(Exception):
    """Base class of every error that elastrain raises on purpose."""


# Also a ValueError, so that callers that do not know this package catch bad arguments under that name.
class ConfigError(ElastrainError, ValueError):
    """An error of the input. The message says what was expected, what was found, and what to do."""


class CutError(ConfigError):
    """A model that cannot be cut into the requested stages.

    The message lists the legal cuts, and what forbids other cuts.
    """


class RefusedError(ElastrainError):
    """Refusal of this process by the job. The message names the setting that differs, and both values."""


class NoRoomError(ElastrainError):
    """Lack of memory: a member cannot hold what its plan asks of it. The message says how much is missing."""


class DriveFailedError(ElastrainError):
    """Failure of a member's drive to write or read. The member ends; the other members have copies of its state."""


# Apart from DivergedError, which ends the whole job. Here the other members are known to be right.
class CorruptedError(ElastrainError):
    """Wrong data in this member, as a comparison with others showed.

    The member ends; the others have the right bits.
    """


class StateLostError(ElastrainError):
    """Loss of all holders of at least one shard. The job ends, because no member can restore that state."""


class DivergedError(ElastrainError):
    """Difference in state that must be equal. The job ends on all nodes, because going on could keep wrong bits."""


class StoppedError(ElastrainError):
    """Stop of the job from outside. Nothing is wrong with this process."""
