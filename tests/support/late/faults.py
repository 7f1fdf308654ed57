"""Failures of the device: an error that sticks to the process, a stream that never ends, use after a fork."""

from __future__ import annotations

import os
import threading

import torch

from tests.support.late.settings import settings

_BROKEN = (
    "LATE error: {cause} on {name} ({uuid}), at operation {number} of this process. "
    "The device cannot be used any more by this process."
)
_FORKED = (
    "Cannot re-initialize LATE in forked subprocess. To use LATE with multiprocessing, you must use the 'spawn' "
    "start method"
)


class Faults:
    """Count of operations, and the failures that are due at one of them."""

    def __init__(self) -> None:
        self.operations = 0
        self.broken = ""
        """Text of the error that every use of the device raises, or nothing."""
        self.hang = threading.Event()
        """Set when the streams that never end go on."""
        self.forked = False
        os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        self.forked = self.operations > 0

    def touch(self) -> None:
        """Raise the error of a device that is broken, or that a parent process uses."""
        if self.forked:
            raise RuntimeError(_FORKED)
        if self.broken:
            raise torch.AcceleratorError(self.broken)

    def break_by(self, cause: str) -> None:
        """Break the device: every later use raises."""
        self.broken = _BROKEN.format(cause=cause, name=settings.name, uuid=settings.uuid, number=self.operations)

    def count(self) -> threading.Event | None:
        """Count an operation. Returns what its stream hangs on from now on, if this is the operation to hang at."""
        self.touch()
        self.operations += 1
        if self.operations == settings.fail_at:
            self.break_by("an illegal memory access was encountered")
            self.touch()
        return self.hang if self.operations == settings.hang_at else None


faults = Faults()
