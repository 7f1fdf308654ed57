"""The handle of something that another thread does: wait for it, or learn how it failed."""

from __future__ import annotations

import threading

from elastrain.comm.errors import CommError


class Work:
    """Finished once, by one thread; waited for by any."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: CommError | ValueError | None = None

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        """Return when it is done. Raises MemberLost, Aborted, Timeout; another CommError or ValueError for misuse.

        Needs no timeout of its own: the work has a deadline.
        """
        self._ended.wait()
        if self._error is not None:
            # A new object for each waiter: one exception raised in several threads mixes their tracebacks.
            raise _copy(self._error) from self._error

    def finish(self, error: CommError | ValueError | None = None) -> None:
        self._error = error
        self._ended.set()


class Received(Work):
    """The handle of an awaited message. `source`: who sent it, once it is done."""

    def __init__(self) -> None:
        super().__init__()
        self.source = ""


def _copy(error: CommError | ValueError) -> CommError | ValueError:
    fresh = type(error).__new__(type(error))
    fresh.__dict__.update(vars(error))
    fresh.args = error.args
    return fresh
