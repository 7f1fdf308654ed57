"""Waits on futex words of a peer and on an alarm of one's own at once, so that no failure leaves a waiter asleep.

`futex_waitv` (Linux 5.16) compares all words before it sleeps: whoever changes one and wakes is never missed. Torch
may never come in.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence

from elastrain.comm.shm.memory import futex_wake_all, libc

_SYS_FUTEX_WAITV = 449  # on every architecture
_WAITER = struct.Struct("@QQII")  # value, address, flags, nothing
_TIME = struct.Struct("@qq")
_SIZE_U32 = 2
_CLOCK_MONOTONIC = 1
_wait = libc["syscall"]
_wait.restype = ctypes.c_long
_wait.argtypes = [ctypes.c_long, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_char_p, ctypes.c_int]
_SIGNALS = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)


def waits_available() -> tuple[bool, str]:
    """Whether words of shared memory can be waited on here, and why (not)."""
    if platform.machine() != "x86_64":
        return False, f"{platform.machine()} may show writes of others in another order"
    libc.syscall(ctypes.c_long(_SYS_FUTEX_WAITV), None, 0, 0, None, 0)
    if ctypes.get_errno() != errno.EINVAL:
        return False, "this kernel has no futex_waitv (Linux 5.16)"
    return True, "x86-64 with futex_waitv"


class Alarm:
    """A word that one thread changes and others wait on."""

    def __init__(self) -> None:
        self._word = ctypes.c_uint32(0)
        self.address = ctypes.addressof(self._word)

    @property
    def count(self) -> int:
        return self._word.value

    def ring(self) -> None:
        """Wake every waiter. By one thread only."""
        self._word.value += 1
        futex_wake_all(self.address)

    def wait(self, count: int, words: Sequence[tuple[int, int]], deadline_s: float) -> None:
        """Block while the alarm's count is `count` and each 32-bit word `(address, value)` in shared memory as it was.

        Returns at the latest at `deadline_s` (time.monotonic()); signals may make it return early.
        """
        waiters = [_WAITER.pack(value, address, _SIZE_U32, 0) for address, value in (*words, (self.address, count))]
        seconds = int(deadline_s)
        until = _TIME.pack(seconds, int((deadline_s - seconds) * 1e9))
        if _wait(_SYS_FUTEX_WAITV, b"".join(waiters), len(waiters), 0, until, _CLOCK_MONOTONIC) >= 0:
            return
        if ctypes.get_errno() not in _SIGNALS:
            code = ctypes.get_errno()
            raise OSError(code, f"futex_waitv: {os.strerror(code)}")
