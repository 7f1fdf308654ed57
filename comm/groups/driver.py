"""Execution of a mesh and its owner: in a thread of its own, or in a caller's thread while that thread sleeps.

On a host with few cores, two changes of threads take longer than an edit. So a caller that would wait executes its call
itself if no thread uses the mesh, and the thread executes it otherwise. One call runs at a time, and the calls of each
thread run in order. This module does not know what the mesh carries.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from elastrain.comm.errors import Aborted, CommError
from elastrain.comm.groups.works import Work
from elastrain.comm.wire.addresses import Event
from elastrain.comm.wire.mesh import Mesh


class Driven(Protocol):
    """The owner of a driver, called by one thread at a time."""

    def hear(self, event: Event) -> None:
        """Handle an event of the mesh."""
        ...

    def check(self) -> None:
        """Do everything that is due. Called after every event or call, and when something is due."""

    def next_due_s(self) -> float:
        """Return the time.monotonic() at which `check` is due; inf if nothing is due."""

    def stop(self, error: CommError) -> None:
        """End all operations with this error, because the driver ends."""

    def linger(self) -> None:
        """Send what other members still need, before the mesh closes in good order."""


class Driver:
    """The thread that drives a mesh. Any thread may call the methods; call `start` once the owner is complete."""

    def __init__(self, mesh: Mesh, driven: Driven) -> None:
        self._mesh, self._driven = mesh, driven
        self._pid = os.getpid()
        self._turn_lock = threading.Lock()  # held by the thread that touches the mesh
        self._asleep_until_s = 0.0  # the thread, if nothing wakes it
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._calls_lock = threading.Lock()
        self._closing = self._ended = self._interrupted = False
        self._thread = threading.Thread(target=self._run, name="elastrain-communicator", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def check_open(self) -> None:
        """Raise CommError if the driver is closed or belongs to the parent of a fork."""
        if self._ended or os.getpid() != self._pid:
            raise CommError("this communicator is closed, or belongs to the process that forked this one")

    def post(self, call: Callable[[], None]) -> None:
        """Let the thread execute this call soon. Raises CommError if the driver is closed."""
        with self._calls_lock:
            self.check_open()
            self._calls.append(call)
        self._mesh.wake()

    def call(self, call: Callable[[], None]) -> None:
        """Execute this call and wait for it. Raises what the call raises."""
        self.call_later(call).wait()

    def call_later(self, call: Callable[[], None]) -> Work:
        """Execute this call as `call` does, but do not wait if the thread has to execute it."""
        work = Work()

        def run() -> None:
            try:
                call()
            except (CommError, ValueError) as error:
                work.finish(error)
            else:
                work.finish()

        if self._calls or not self._turn_lock.acquire(blocking=False):
            self.post(run)
            return work
        try:
            self.check_open()
            self._carry_out(run)
        finally:
            self._turn_lock.release()
        return work

    def _carry_out(self, call: Callable[[], None]) -> None:
        """Execute a call in this thread while the driver's thread sleeps."""
        try:
            call()
            self._driven.check()
        except BaseException:  # an interrupt, or a bug: what was done by half must not be used
            self._interrupted = True
            self._mesh.wake()
            raise
        if self._due_s() < self._asleep_until_s:
            self._mesh.wake()

    def _due_s(self) -> float:
        return min(self._driven.next_due_s(), self._mesh.next_due_s())

    def close(self) -> None:
        """End the thread and the mesh. Operations in progress end with Aborted."""
        self._closing = True
        self._mesh.wake()
        self._thread.join()

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # of this thread: what is communicated may belong to a graph, communicating never
        ready: Sequence[tuple[int, int]] = ()
        try:
            while not self._closing:
                with self._turn_lock:
                    self._turn(ready)
                ready = self._mesh.sleep(self._asleep_until_s)
        except Exception as error:  # noqa: BLE001 - the edge of the thread: every waiter learns what happened
            self._end(CommError(f"the communicator's thread failed: {error!r}"))
        else:
            self._end(Aborted("this communicator was closed"))

    def _turn(self, ready: Sequence[tuple[int, int]]) -> None:
        if self._interrupted:
            raise RuntimeError("a call was interrupted")
        for event in self._mesh.serve(ready):
            self._driven.hear(event)
        while self._calls:
            self._calls.popleft()()
        self._driven.check()
        self._mesh.tidy_up()
        self._asleep_until_s = self._due_s()

    def _end(self, error: CommError) -> None:
        with self._turn_lock:
            self._driven.stop(error)
            with self._calls_lock:
                self._ended = True
            while self._calls:
                self._calls.popleft()()  # operations fail at once now; no thread is left waiting
            self._driven.check()
            if isinstance(error, Aborted):
                self._driven.linger()
            self._mesh.close()
