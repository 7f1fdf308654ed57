"""The errors of offloading, named by what the caller can do next. Nothing but names and sentences lives here.

OffloadError
├── OffloadConfigError     fix the input: a directory, a size, an engine
│   └── LimitTooSmallError    raise memory_limit; `smallest_bytes` is the smallest that works
├── SpillWriteError        a device refused to take activations: free space, raise the quota, or use another directory
├── SpillReadError         saved activations did not come back: compute the micro-batch again
│   └── CorruptSpillError     they came back changed: compute the micro-batch again, and look at the drive
├── PieceLostError         parameters, gradients or optimizer state did not come back: start from a checkpoint
└── ModifiedInPlaceError   the model changed a tensor that backward needs: replace the in-place operation
"""

from __future__ import annotations


class OffloadError(Exception):
    """Root of everything that offloading raises on purpose."""


class OffloadConfigError(OffloadError, ValueError):
    """The input is wrong. The message says what was expected, what came, and what to do."""


class LimitTooSmallError(OffloadConfigError):
    """`memory_limit` is below what one operation of the model needs at once, or one block of it: `needed_by`.

    `before_a_plan`: only one point was looked at, so that the smallest one that works may be larger.
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
    """Activations could not be written. They are still in memory; no gradient is wrong."""


class SpillReadError(OffloadError):
    """Activations could not be read back. Backward cannot go on; compute the micro-batch again."""


class CorruptSpillError(SpillReadError):
    """Activations were read back with other bytes than were written."""


class PieceLostError(OffloadError):
    """Parameters, gradients or optimizer state did not come back from a drive: no step can be right any more."""


class ModifiedInPlaceError(OffloadError, RuntimeError):
    """A saved tensor was changed in place before backward used it: the gradient would be wrong."""
