"""Threads for work that blocks: a call gets an idle one, or a new one when all are busy. Knows nothing of the work.

A ThreadPoolExecutor does not serve here. Its threads are limited, and operations of different groups may wait for each
other: at the limit all would stand still. And the interpreter waits for its threads before it runs what `atexit` holds,
so a communicator that is closed there could not end what they wait for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

_JOIN_S = 5.0


class Crew:
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
