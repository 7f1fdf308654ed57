"""Knowing within milliseconds that a process on this host is gone, before its sockets close.

A `Beacon` is a page of shared memory with a robust mutex, held by one thread for the whole life of its process. When
that thread dies, however it dies, the kernel marks the mutex's word and wakes a waiter, before the process's memory is
torn down (which takes a third of a second per GiB; only then sockets close).

Watchers do not lock the mutex: they wait on its word (a futex), for which a read-only map is enough, so that nobody can
damage another's beacon. The kernel wakes one waiter only; each that wakes up wakes all others.

Torch may never come in: the launcher uses this too.
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
_GENERATION_BYTES = 256  # where its word lies in the page: behind the mutex, before the whereabouts
_FUTEX_WAITERS = 0x80000000
_FUTEX_TID_MASK = 0x3FFFFFFF
_LOOK_AGAIN_S = 1.0  # backstop, should the one waiter that the kernel woke be killed before it woke the others


class Beacon:
    """Locked by the thread that makes it, which must live as long as the process: make it in the main thread.

    `fd` is what watchers need; pass it over a UNIX socket. It stays owned by this object. Behind the mutex, `page` has
    room for `whereabouts`. Raises CommError where the C library's mutexes are not of the known form (glibc's are).
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
        # "Somebody waits": without this bit the kernel would wake nobody. No one else knows the page yet.
        word.value |= _FUTEX_WAITERS
        _beacons.add(self)

    def tell_generation(self, generation: int) -> None:
        """Let whoever reads along know which view this process is in, before it does anything in that view."""
        ctypes.c_int64.from_address(self.page.address + _GENERATION_BYTES).value = generation

    def close(self) -> None:
        """Unlock, which tells every watcher that this process has left. Only from the thread that made the beacon."""
        if self in _beacons:
            _beacons.remove(self)
            libc.pthread_mutex_unlock(self._mutex)
            futex_wake_all(self.page.address)
            os.close(self.fd)


_beacons: set[Beacon] = set()
"""The open ones of this process, kept although nobody else may have them: the C library goes through their pages."""


def _after_fork_in_child() -> None:
    for beacon in _beacons:
        os.close(beacon.fd)  # the mutex is the parent's
    _beacons.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Watcher:
    """One daemon thread that waits for the end of one beacon's owner."""

    def __init__(self, page: Mapping, on_death: Callable[[float], None]) -> None:
        self._on_death = on_death
        self.page = page
        """Read-only: the owner's mutex, and its `whereabouts`."""
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="elastrain-beacon-watcher", daemon=True)
        self._thread.start()

    @property
    def owner_ended(self) -> bool:
        """Whether the owner is gone already, although `on_death` may not have been called so far."""
        return ctypes.c_uint32.from_address(self.page.address).value & _FUTEX_TID_MASK == 0

    @property
    def generation(self) -> int:
        """The newest view that the owner was in, also after it has ended or the watching has; 0 before the first."""
        return ctypes.c_int64.from_address(self.page.address + _GENERATION_BYTES).value

    def cancel(self) -> None:
        """Stop watching; `on_death` is not called any more once this returns. Not from within `on_death`."""
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
    """Call `on_death(monotonic time)` once, from a thread of its own, when the beacon's owner dies or closes it.

    `fd` may be closed afterwards. A beacon whose owner is dead already reports at once. Raises ProtocolError when `fd`
    is no beacon.
    """
    return Watcher(open_sealed(fd, _PAGE_BYTES), on_death)
