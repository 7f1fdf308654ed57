"""Detection that a process on this host has died, within milliseconds and before its sockets close.

A `Beacon` is a page of shared memory with a robust mutex. One thread holds the mutex for the whole life of its process.
When that thread dies, for any reason, the kernel marks the mutex's word and wakes one waiter. It does so before it
frees the memory of the process, which takes a third of a second per GiB; sockets close only after that.

Watchers do not lock the mutex. They wait on its word (a futex), for which a read-only mapping is enough, so no process
can damage the beacon of another. The kernel wakes one waiter only; every waiter that wakes up wakes all others.

This module never imports torch, because the launcher uses it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

from elastrain.comm.errors import CommError
from elastrain.comm.shm.shared_memory import Mapping, create_sealed, futex_wait, futex_wake_all, libc, open_sealed

_PAGE_BYTES = 4096
_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1
_GENERATION_BYTES = 256  # offset of the generation in the page: behind the mutex, before the threads' records
_FUTEX_WAITERS = 0x80000000
_FUTEX_TID_MASK = 0x3FFFFFFF
_LOOK_AGAIN_S = 1.0  # in case the one waiter that the kernel wakes is killed before it wakes the others


class Beacon:
    """A page with a mutex that is locked by the thread that creates the beacon.

    That thread must live as long as the process, so create the beacon in the main thread. Watchers need `fd`; pass it
    over a UNIX socket. It stays owned by this object. Behind the mutex, `page` has room for the records of
    `heartbeat_page`. Raises CommError if the C library's mutexes do not have the layout of glibc.
    """

    def __init__(self) -> None:
        self.fd, self.page = create_sealed("elastrain-beacon", _PAGE_BYTES)
        self._mutex = ctypes.c_void_p(self.page.address)
        attributes = ctypes.create_string_buffer(64)
        for code in (
            libc.pthread_mutexattr_init(attributes),
            libc.pthread_mutexattr_setpshared(attributes, _PTHREAD_PROCESS_SHARED),
            libc.pthread_mutexattr_setrobust(attributes, _PTHREAD_MUTEX_ROBUST),
            libc.pthread_mutex_init(self._mutex, attributes),
            libc.pthread_mutex_lock(self._mutex),
        ):
            if code:
                raise CommError(f"the robust mutex of this process could not be made: {os.strerror(code)}")
        word = ctypes.c_uint32.from_address(self.page.address)
        if word.value & _FUTEX_TID_MASK != threading.get_native_id():
            raise CommError("this C library keeps a mutex's owner elsewhere: robust-mutex detection needs glibc")
        # Without this bit ("there are waiters") the kernel wakes no process. No other process knows the page yet.
        word.value |= _FUTEX_WAITERS
        _beacons.add(self)

    def tell_generation(self, generation: int) -> None:
        """Publish the view in which this process is, before it does anything in that view."""
        ctypes.c_int64.from_address(self.page.address + _GENERATION_BYTES).value = generation

    def close(self) -> None:
        """Unlock the mutex: every watcher then sees that this process has left. Only for the creating thread."""
        if self in _beacons:
            _beacons.remove(self)
            libc.pthread_mutex_unlock(self._mutex)
            futex_wake_all(self.page.address)
            os.close(self.fd)


_beacons: set[Beacon] = set()
"""Open beacons of this process. They are kept alive here, because the C library walks through their pages."""


def _after_fork_in_child() -> None:
    for beacon in _beacons:
        os.close(beacon.fd)  # the mutex is the parent's
    _beacons.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Watcher:
    """A daemon thread that waits for the end of one beacon's owner."""

    def __init__(self, page: Mapping, on_death: Callable[[float], None]) -> None:
        self._on_death = on_death
        self.page = page
        """The owner's page, mapped read-only: the mutex, the generation, and the records of `heartbeat_page`."""
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="elastrain-beacon-watcher", daemon=True)
        self._thread.start()

    @property
    def owner_ended(self) -> bool:
        """True if the owner is gone, even if `on_death` was not called yet."""
        return ctypes.c_uint32.from_address(self.page.address).value & _FUTEX_TID_MASK == 0

    @property
    def generation(self) -> int:
        """The newest view in which the owner was; 0 before the first.

        Readable also after the owner's end and after `cancel`.
        """
        return ctypes.c_int64.from_address(self.page.address + _GENERATION_BYTES).value

    def cancel(self) -> None:
        """Stop watching. `on_death` is not called any more once this returns. Not allowed from within `on_death`."""
        self._cancelled.set()
        while self._thread.is_alive():
            # The thread may be just about to wait: wake until it has seen the flag.
            futex_wake_all(self.page.address)
            self._thread.join(timeout=0.005)

    def _wait(self) -> None:
        word = ctypes.c_uint32.from_address(self.page.address)
        while not self._cancelled.is_set():
            value = word.value
            if value & _FUTEX_TID_MASK == 0:
                known_s = time.monotonic()
                futex_wake_all(self.page.address)
                self._on_death(known_s)
                return
            futex_wait(self.page.address, value, _LOOK_AGAIN_S)


def watch_beacon(fd: int, on_death: Callable[[float], None]) -> Watcher:
    """Call `on_death(monotonic time)` once, from its own thread, when the beacon's owner dies or closes it.

    The caller may close `fd` afterwards. If the owner is already dead, the call comes at once. Raises ProtocolError if
    `fd` is no beacon.
    """
    return Watcher(open_sealed(fd, _PAGE_BYTES), on_death)
