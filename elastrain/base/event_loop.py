"""An event loop: one epoll, one wake-up descriptor, and one callback per descriptor. Linux only."""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

READ = select.EPOLLIN
WRITE = select.EPOLLOUT


class HasFileno(Protocol):
    """An object with a file descriptor, such as a socket."""

    def fileno(self) -> int:
        """Return the descriptor."""
        ...


Source = int | HasFileno


@dataclass(kw_only=True)
class _Watched:
    callback: Callable[[int], None]
    events: int
    born: int


class EventLoop:
    """A loop that passes ready events to callbacks. Callbacks never block, and may register and unregister descriptors.

    One thread at a time drives it. Other threads may call `wake` at any time, and every method while the loop is in
    `wait`.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watched: dict[int, _Watched] = {}
        self._round = 0
        self._open = True
        self._epoll.register(self._wake_fd, READ)
        # `close` leaves this descriptor open. A thread that wakes the loop at that moment would otherwise write into
        # whatever gets the same number next, for example another object's socket.
        self._close_wake_fd = weakref.finalize(self, os.close, self._wake_fd)
        self._close_wake_fd.atexit = False

    def register(self, source: Source, callback: Callable[[int], None], events: int = READ) -> None:
        """Call `callback` with the ready events whenever the descriptor has some of `events`."""
        fd = _fd(source)
        self._watched[fd] = _Watched(callback=callback, events=events, born=self._round)
        self._epoll.register(fd, events)

    def modify(self, source: Source, events: int) -> None:
        """Wait for other events of a registered descriptor."""
        fd = _fd(source)
        watched = self._watched[fd]
        if watched.events != events:
            watched.events = events
            self._epoll.modify(fd, events)

    def unregister(self, source: Source) -> None:
        """Stop watching a descriptor.

        Call this before the descriptor is closed. Does nothing if it is not registered.
        """
        fd = _fd(source)
        if self._watched.pop(fd, None):
            self._epoll.unregister(fd)

    def wake(self) -> None:
        """Make a running or the next `wait` return soon. Safe from any thread, also after `close`."""
        if self._open:
            try:
                os.eventfd_write(self._wake_fd, 1)
            except OSError:
                pass  # full: the loop is awake already; closed meanwhile: no loop is left to wake

    def turn(self, deadline_s: float | None) -> None:
        """Wait until something is ready, or until the deadline (time.monotonic()), then run its callbacks."""
        self.serve(self.wait(None if deadline_s is None else max(0.0, deadline_s - time.monotonic())))

    # A turn in two halves, between which another thread may take over.

    def wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Wait at most `timeout_s` until something is ready. Returns the ready descriptors for `serve`."""
        self._round += 1
        return self._epoll.poll(-1 if timeout_s is None else timeout_s)

    def serve(self, ready: Sequence[tuple[int, int]]) -> None:
        """Run the callbacks of the descriptors that `wait` returned."""
        for fd, events in ready:
            if fd == self._wake_fd:
                os.eventfd_read(fd)
                continue
            watched = self._watched.get(fd)
            # The descriptor may have been closed since `wait` began, and its number given to a new one.
            if watched is not None and watched.born < self._round:
                watched.callback(events)

    def close(self) -> None:
        """Close the epoll.

        Nothing is waited for afterwards. In a forked child this leaves the parent's loop as it is.
        """
        if self._open:
            self._open = False
            self._epoll.close()

    def close_in_child(self) -> None:
        """Close the loop in a forked child, with its wake-up descriptor: no other thread there could wake the loop."""
        self.close()
        self._close_wake_fd()


def _fd(source: Source) -> int:
    return source if isinstance(source, int) else source.fileno()
