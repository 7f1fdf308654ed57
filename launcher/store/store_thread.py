"""The use of a store by an event loop: calls go to a thread, and answers come back through a descriptor.

    inbox = Inbox();  loop.register(inbox.fd, lambda _events: inbox.deliver())
    calls = StoreThread(store, inbox)
    calls.call(lambda store: store.get(key), on_answer)   # returns at once; later on_answer(Item | None | StoreError)

`RepeatedCalls` repeats calls, and `Followed` follows a prefix. Keys have no meaning here, and an outage of the store
arrives as a StoreError.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from elastrain.launcher.store.port import Broken, Change, Item, Listing, Store, StoreError, Watch

T = TypeVar("T")


class Inbox:
    """Calls posted by other threads. The thread that serves `fd` makes them, in the order in which they were posted."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def post(self, call: Callable[[], None]) -> None:
        """Add a call, from any thread. It is dropped once the inbox is closed."""
        with self._lock:
            if not self._closed:
                self._calls.append(call)
                os.eventfd_write(self.fd, 1)

    def deliver(self) -> None:
        """Make the posted calls. The loop calls this whenever `fd` is readable."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return
        while self._calls:
            self._calls.popleft()()

    def close(self) -> None:
        """Drop the posted calls and close the descriptor."""
        with self._lock:
            self._closed = True
            self._calls.clear()
            os.close(self.fd)


class StoreThread:
    """A thread that makes a store's blocking calls, one after the other. The store has another owner."""

    def __init__(self, store: Store, inbox: Inbox) -> None:
        self._store = store
        self._inbox = inbox
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="elastrain-store", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[Store], T], then: Callable[[T | StoreError], None]) -> None:
        """Run `work` in the thread, and then `then` in the loop, with the result or the StoreError.

        `work` may make several calls.
        """

        def carry_out() -> None:
            answer: T | StoreError
            try:
                answer = work(self._store)
            except StoreError as error:
                answer = error
            self._inbox.post(lambda: then(answer))

        self._work.put(carry_out)

    def settle(self, timeout_s: float) -> bool:
        """Wait until all earlier calls are done, for `timeout_s` at most. Returns False if some are not."""
        settled = threading.Event()
        self._work.put(settled.set)
        return settled.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Finish the earlier calls, for `timeout_s` at most. Returns False if one still waits: close the store then."""
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


_AGAIN_S = 0.5


class RepeatedCalls:
    """Calls that are repeated, until they are answered or for ever. The owner's loop calls `on_tick`."""

    def __init__(self, thread: StoreThread) -> None:
        self._thread = thread
        self._later: list[tuple[float, Callable[[], None]]] = []

    def until_answered(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Repeat `work` until it does not raise a StoreError, then pass its result to `then`."""

        def answered(answer: T | StoreError) -> None:
            if isinstance(answer, StoreError):
                self._later.append((time.monotonic() + _AGAIN_S, lambda: self.until_answered(work, then)))
            else:
                then(answer)

        self._thread.call(lambda _: work(), answered)

    def for_ever(self, every_s: float, work: Callable[[], None]) -> None:
        """Repeat `work` for ever. The interval starts at each answer, so that calls do not pile up during an outage."""

        def answered(_: StoreError | None) -> None:
            self._later.append((time.monotonic() + every_s, lambda: self.for_ever(every_s, work)))

        self._thread.call(lambda _: work(), answered)

    def next_deadline_s(self) -> float | None:
        """Return the monotonic time of the next repetition, or None."""
        return min((due_s for due_s, _ in self._later), default=None)

    def on_tick(self, now: float) -> None:
        """Make the calls that are due."""
        due = [call for due_s, call in self._later if due_s <= now]
        self._later = [(due_s, call) for due_s, call in self._later if due_s > now]
        for call in due:
            call()


_PAUSE_S = 0.25
"""Pause before listing again, so that a store that breaks every watch is not asked without end."""


class Followed:
    """A prefix of the store that is followed: listed, watched, and listed again whenever the watch breaks.

    `on_items` is posted to the inbox with all items and the revision, at first and after every change. `on_trouble` is
    posted for each failed listing; the next `on_items` ends the trouble. A key that came and went in between is not
    seen.
    """

    def __init__(
        self,
        store: Store,
        inbox: Inbox,
        prefix: str,
        on_items: Callable[[Mapping[str, Item], int], None],
        on_trouble: Callable[[StoreError], None],
    ) -> None:
        self._store, self._inbox, self._prefix = store, inbox, prefix
        self._on_items, self._on_trouble = on_items, on_trouble
        self._items: dict[str, Item] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # Set when the watch is broken, or `close` was called.
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"elastrain-follow-{prefix}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop following. Waits for a call under way for up to `timeout_s`; closing the store ends it at once."""
        self._closed.set()
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            watch = self.look()
            if watch is not None:
                if not self._closed.is_set():  # `close` may have set `_wake` before it was cleared
                    self._wake.wait()
                watch.cancel()
            self._closed.wait(_PAUSE_S)

    def look(self) -> Watch | None:
        """List the items, and watch from there. Returns None if the store does not answer."""
        try:
            listing = self._store.list(self._prefix)
        except StoreError as error:
            trouble = error
            self._inbox.post(lambda: self._on_trouble(trouble))
            return None
        self._wake.clear()
        self._begin_with(listing)
        return self._store.watch(self._prefix, listing.revision, self._take)

    def _begin_with(self, listing: Listing) -> None:
        with self._lock:
            self._items = {item.key: item for item in listing.items}
            self._post(listing.revision)

    def _take(self, change: Change | Broken) -> None:
        if isinstance(change, Broken):
            self._wake.set()
            return
        with self._lock:
            if change.value is None:
                self._items.pop(change.key, None)
            else:
                self._items[change.key] = Item(key=change.key, value=change.value, revision=change.revision)
            self._post(change.revision)

    def _post(self, revision: int) -> None:
        items = dict(self._items)
        self._inbox.post(lambda: self._on_items(items, revision))
