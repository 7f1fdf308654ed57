"""Requests to other threads, and the handles by which a caller waits for them or learns how they failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from elastrain.comm.collectives.operations import MakeOperation
from elastrain.comm.errors import CommError


class Work:
    """Is finished once, by one thread, and waited for by any.

    `source`: the sender of an awaited message, once it is done.
    """

    def __init__(self) -> None:
        self.source = ""
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

        It needs no timeout: the work has a deadline.
        """
        if not self._done:
            with self._gate:  # the next waiter gets it after that
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
        """Finish it, well or with an error. By the thread that does the work."""
        with self._lock:
            self._error = error
            self._done = True
            self._gate.release()
        for callback in self._then:
            callback()
        self._then.clear()


@dataclass(kw_only=True)
class OperationRequest:
    """One call of a collective. `barrier`: it is one, so it may itself be the wait for all members of a generation."""

    work: Work
    make: MakeOperation
    deadline_s: float
    timeout_s: float
    barrier: bool = False


def _copy(error: CommError | ValueError) -> CommError | ValueError:
    fresh = type(error).__new__(type(error))
    fresh.__dict__.update(vars(error))
    fresh.args = error.args
    return fresh
