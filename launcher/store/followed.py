"""A prefix of the store, followed while the job lives: listed, watched, listed again whenever the watch breaks.

What a key means is not known here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from elastrain.launcher.store.port import Broken, Change, Item, Listing, Store, StoreError, Watch
from elastrain.launcher.store.thread import Inbox

_PAUSE_S = 0.25
"""Before listing again, so that a store that breaks every watch is not asked without end."""


class Followed:
    """Posts to the inbox: `on_items` with all items under the prefix and the store's revision, at first and after every
    change, and `on_trouble` for each failed try to list. After trouble, the next `on_items` says that it is over; what
    happened between is in it, but a key that came and went meanwhile is never seen.
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
        # Set when the watch is broken, or nobody follows any more.
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"elastrain-follow-{prefix}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 1.0) -> None:
        """A call under way is waited for up to `timeout_s`; closing the store ends it at once."""
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
        """List, and watch from there. None where the store does not answer."""
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
