"""Requests to other threads, and the handles by which a caller waits for them or learns how they failed.

Threads for work that blocks: a call gets an idle one, or a new one when all are busy. Knows nothing of the work.

A ThreadPoolExecutor does not serve here. Its threads are limited, and operations of different groups may wait for each
other: at the limit all would stand still. And the interpreter waits for its threads before it runs what `atexit` holds,
so a communicator that is closed there could not end what they wait for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from elastrain.comm.collectives.reducing import MakeOperation
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


_JOIN_S = 5.0


class ThreadPool:
    """Its threads live until `close`. A call must not raise."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0

    def do(self, call: Callable[[], None]) -> None:
        """Run it soon, while others go on running."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._calls.put(call)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # what it refers to must not live until the next one comes
            with self._lock:
                self._idle += 1

    def close(self) -> None:
        """End the threads and wait for them; what they run must be about to end."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
