"""How a loop that must not stand still uses a store: calls go to a thread, answers come back through a descriptor.

    inbox = Inbox();  loop.register(inbox.fd, lambda _events: inbox.deliver())
    calls = StoreThread(store, inbox)
    calls.call(lambda store: store.get(key), on_answer)   # at once; later: on_answer(Item | None | StoreError)

Nothing is decided here, and nothing is repeated: an outage of the store arrives as a StoreError.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from elastrain.launcher.store.port import Store, StoreError

T = TypeVar("T")


class Inbox:
    """Calls posted by other threads, made by the one that serves `fd`. In the order in which they were posted."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def post(self, call: Callable[[], None]) -> None:
        """From any thread. Dropped once the inbox is closed."""
        with self._lock:
            if not self._closed:
                self._calls.append(call)
                os.eventfd_write(self.fd, 1)

    def deliver(self) -> None:
        """Whenever `fd` is readable."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return
        while self._calls:
            self._calls.popleft()()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._calls.clear()
            os.close(self.fd)


class StoreThread:
    """Carries a store's blocking calls out, one after the other. Does not own the store."""

    def __init__(self, store: Store, inbox: Inbox) -> None:
        self._store = store
        self._inbox = inbox
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="elastrain-store", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[Store], T], then: Callable[[T | StoreError], None]) -> None:
        """`work` may make several calls; what it returns, or the StoreError it ends with, is handed to `then`."""

        def carry_out() -> None:
            answer: T | StoreError
            try:
                answer = work(self._store)
            except StoreError as error:
                answer = error
            self._inbox.post(lambda: then(answer))

        self._work.put(carry_out)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all that was asked for so far is carried out, for `timeout_s` at most. False if it is not."""
        settled = threading.Event()
        self._work.put(settled.set)
        return settled.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Carry out what was asked for, for `timeout_s` at most. False if a call still waits: close the store then."""
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
