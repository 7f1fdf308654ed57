"""Requests to other threads (`OperationRequest`), their results (`Work`), and a pool of threads for work that blocks.

`ThreadPool` gives each call an idle thread, or a new one if all are busy. A ThreadPoolExecutor cannot replace it, for
two reasons. Its threads are limited, but operations of different groups may wait for each other: at the limit all would
hang. And the interpreter joins its threads before it runs `atexit` functions, so a communicator that is closed by
`atexit` could not end the operations for which they wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from elastrain.comm.collectives.reducing import MakeOperation
from elastrain.comm.errors import CommError
from elastrain.device import DeviceEvent


class Work:
    """Result of a call that another thread carries out. One thread finishes it, any thread may wait for it.

    `source`: once a receive is done, the sender of the message. `landed`: copies of results to a device, which whoever
    finishes the work has submitted.
    """

    def __init__(self, landed: list[DeviceEvent] | None = None) -> None:
        self.source = ""
        self.landed: list[DeviceEvent] = [] if landed is None else landed
        self._done = False
        self._gate = threading.Lock()  # held until the work is finished: a lock costs far less than an Event
        self._gate.acquire()
        self._error: CommError | ValueError | None = None
        self._then: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """True once the call has ended, with success or with an error."""
        return self._done

    @property
    def error(self) -> CommError | ValueError | None:
        """Error of the call, or None while it is in progress or if it succeeded."""
        return self._error

    def wait(self) -> None:
        """Wait until the call has ended. No timeout is needed: the call itself has a deadline.

        For results on a device, the current stream of this thread waits for them; the thread itself does not.

        Raises MemberLost, Aborted or Timeout, and another CommError or ValueError for misuse.
        """
        if not self._done:
            with self._gate:  # each waiter takes the lock and releases it for the next
                pass
        for event in self.landed:  # after an error, too: the caller may use the tensors again
            event.wait()
        if self._error is not None:
            # A new exception for each waiter: one object raised in several threads would mix their tracebacks.
            raise _copy(self._error) from self._error

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the thread that finishes this work, or at once if it is finished already."""
        with self._lock:
            if not self._done:
                self._then.append(callback)
                return
        callback()

    def finish(self, error: CommError | ValueError | None = None) -> None:
        """Finish this work, with success or with an error. Only the thread that carries it out calls this."""
        with self._lock:
            self._error = error
            self._done = True
            self._gate.release()
        for callback in self._then:
            callback()
        self._then.clear()


@dataclass(kw_only=True)
class OperationRequest:
    """One call of a collective.

    `barrier`: the operation is a barrier, so in a new generation it can itself be the wait for all members.
    """

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
    """A pool of threads without an upper limit. Threads live until `close`. A call must not raise."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0

    def do(self, call: Callable[[], None]) -> None:
        """Run `call` soon, in parallel with the other calls."""
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
            del call  # its references must not live until the next call
            with self._lock:
                self._idle += 1

    def close(self) -> None:
        """End the threads and wait for each, at most `_JOIN_S`. Running calls must be about to end."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)
