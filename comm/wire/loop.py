"""One epoll, one wake-up descriptor, one callback per descriptor. What the descriptors mean is not known here."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass

READ = select.EPOLLIN
WRITE = select.EPOLLOUT


@dataclass(kw_only=True)
class _Registration:
    callback: Callable[[int], None]
    events: int
    born: int


class Loop:
    """Driven by one thread at a time; only `wake` may be called from others, and all beside `wait`."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._registered: dict[int, _Registration] = {}
        self._round = 0
        self._open = True
        self._epoll.register(self._wake_fd, READ)

    def register(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        self._registered[fd] = _Registration(callback=callback, events=events, born=self._round)
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        registration = self._registered[fd]
        if registration.events != events:
            registration.events = events
            self._epoll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        """To be called before the descriptor is closed."""
        if self._registered.pop(fd, None):
            self._epoll.unregister(fd)

    def wake(self) -> None:
        """Make a running or the next `wait` return soon. Safe from any thread, also after `close`."""
        if self._open:
            try:
                os.eventfd_write(self._wake_fd, 1)
            except OSError:
                pass  # full: it is awake already; closed meanwhile: nobody is left to wake

    def wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Wait until something is ready, at most `timeout_s`: what is, for `serve`. Other threads may use the other
        methods meanwhile.
        """
        self._round += 1
        return self._epoll.poll(-1 if timeout_s is None else timeout_s)

    def serve(self, ready: Sequence[tuple[int, int]]) -> None:
        """Run the callbacks of what `wait` has found."""
        for fd, events in ready:
            if fd == self._wake_fd:
                os.eventfd_read(fd)
                continue
            registration = self._registered.get(fd)
            # The descriptor may have been closed since `wait` began, and another one opened anew under its number.
            if registration is not None and registration.born < self._round:
                registration.callback(events)

    def close(self) -> None:
        """Close its own two descriptors. In a forked child this leaves the parent's loop as it is."""
        if self._open:
            self._open = False
            self._epoll.close()
            os.close(self._wake_fd)
