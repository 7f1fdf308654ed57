"""The handle of something that another thread does: wait for it, or learn how it failed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastrain.comm.errors import CommError


class Work:
    """Finished once, by one thread; waited for by any."""

    def __init__(self) -> None:
        self._done = False
        self._gate = threading.Lock()  # held until it is done: a lock of its own takes far less than an Event
        self._gate.acquire()
        self._error: CommError | ValueError | None = None
        self._then: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        return self._done

    @property
    def error(self) -> CommError | ValueError | None:
        """How it failed; None while it is under way or when it is done well."""
        return self._error

    def wait(self) -> None:
        """Return when it is done. Raises MemberLost, Aborted, Timeout; another CommError or ValueError for misuse.

        Needs no timeout of its own: the work has a deadline.
        """
        if not self._done:
            with self._gate:  # the next one who waits gets it after that
                pass
        if self._error is not None:
            # A new object for each waiter: one exception raised in several threads mixes their tracebacks.
            raise _copy(self._error) from self._error

    def then(self, callback: Callable[[], None]) -> None:
        """Call back when it is done, in the thread that finishes it; at once if it is done already."""
        with self._lock:
            if not self._done:
                self._then.append(callback)
                return
        callback()

    def finish(self, error: CommError | ValueError | None = None) -> None:
        """By the one who does the work."""
        with self._lock:
            self._error = error
            self._done = True
            self._gate.release()
        for callback in self._then:
            callback()
        self._then.clear()


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
