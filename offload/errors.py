"""Errors of offloading, one class for each remedy. No logic besides their messages.

OffloadError
├── OffloadConfigError     wrong input: correct the directory, the size or the engine
│   └── LimitTooSmallError    raise memory_limit; `smallest_bytes` is the smallest that works
├── SpillWriteError        a device refused activations: free space, raise the quota, or use another directory
├── SpillReadError         saved activations could not be read: compute the micro-batch again
│   └── CorruptSpillError     they came back with other bytes: compute it again, and check the drive
├── PieceLostError         parameters, gradients or optimizer state are lost: restart from a checkpoint
└── ModifiedInPlaceError   the model changed a tensor that backward needs: replace the in-place operation
"""

from __future__ import annotations


class OffloadError(Exception):
    """Base class of all errors that offloading raises on purpose."""


class OffloadConfigError(OffloadError, ValueError):
    """Wrong input. The message says what was expected, what was given, and what to do."""


class LimitTooSmallError(OffloadConfigError):
    """A `memory_limit` below what one operation or block of the model (`needed_by`) needs at once.

    `before_a_plan` means that only one point of the step was examined, so that the real minimum may be larger.
    """

    def __init__(
        self, limit_bytes: int, smallest_bytes: int, needed_by: str = "", *, before_a_plan: bool = False
    ) -> None:
        self.limit_bytes = limit_bytes
        self.smallest_bytes = smallest_bytes
        self.needed_by = needed_by
        needs = f", which {needed_by} needs" if needed_by else ""
        least = (
            f"it has to be at least {smallest_bytes} bytes{needs}, and a plan of the step may need more; raise it"
            if before_a_plan
            else f"the smallest that works for this model and batch is {smallest_bytes} bytes{needs}; raise it, or use "
            f"a smaller micro-batch"
        )
        super().__init__(f"memory_limit={limit_bytes} bytes is too small: {least}")


class SpillWriteError(OffloadError):
    """A failed write of activations. They are still in memory, and all gradients stay correct."""


class SpillReadError(OffloadError):
    """A failed read of activations. Backward cannot continue; compute the micro-batch again."""


class CorruptSpillError(SpillReadError):
    """A read that returned other bytes than were written."""


class PieceLostError(OffloadError):
    """A failed read of parameters, gradients or optimizer state. No later step can be correct."""


class ModifiedInPlaceError(OffloadError, RuntimeError):
    """An in-place change of a saved tensor before backward used it. Its gradient would be wrong."""
