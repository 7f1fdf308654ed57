"""The agent's event loop: readable and writable descriptors to handlers. One thread; handlers never block.

Knows nothing of workers or jobs.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from typing import Any


class Loop:
    """A thin layer over `selectors`: handlers may add and drop descriptors, their own included, at any time."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def serve(self, what: Any, handler: Callable[[], None]) -> None:
        """Call `handler` whenever `what` (a descriptor or a socket) is readable."""
        self._selector.register(what, selectors.EVENT_READ, handler)

    def want_write(self, what: Any, wanted: bool) -> None:
        """Also call the handler when `what` is writable, or no longer."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        self._selector.modify(what, events, self._selector.get_key(what).data)

    def drop(self, what: Any) -> None:
        """Before `what` is closed."""
        self._selector.unregister(what)

    def turn(self, deadline_s: float | None) -> None:
        """Serve what is ready; wait for it until the deadline (monotonic seconds) at most."""
        timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        for key, _ in self._selector.select(timeout_s):
            # An earlier handler of this turn may have closed it, and its number may even be in use again.
            current = self._selector.get_map().get(key.fd)
            if current is not None and current.fileobj is key.fileobj:
                current.data()

    def close(self) -> None:
        self._selector.close()
