"""Sealed shared memory, and waits on words in it, by the system calls mmap, munmap and futex through ctypes.

A memfd has no name, so nothing remains when all its holders are killed. The owner maps it writable and then seals it:
no other process can write to it, shrink it or grow it.

An `Alarm` waits on futex words of peers and on a word of this process at once, so a failure here ends a wait for a
peer. It uses `futex_waitv` (Linux 5.16), which compares all words before it sleeps: no change is missed.

This module never imports torch, because the launcher uses it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from collections.abc import Callable, Sequence

from elastrain.comm.errors import OutOfMemory, ProtocolError

_F_SEAL_FUTURE_WRITE = 0x10  # named in `fcntl` from Python 3.13 on
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
HUGE_PAGE_BYTES = 2 << 20
_PROT_READ, _PROT_WRITE, _MAP_SHARED = 1, 2, 1
_MAP_NOTHING = 0x2 | 0x20 | 0x4000  # private, anonymous, nothing reserved
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # MADV_COLLAPSE exists since Linux 6.1
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.syscall.restype = ctypes.c_long
# A separate function object with argument types is twice as fast, and every step of a collective wakes peers.
_wake = libc["syscall"]
_wake.restype = ctypes.c_long
_wake.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]


Pin = Callable[[memoryview, bool], Callable[[], object] | None]
"""A function that pins memory and returns a function that releases it; None if it is not pinned. True: read-only."""


class Mapping:
    """`size_bytes` of shared memory at `address`, unmapped when this object is garbage-collected.

    Unlike `mmap.mmap` it keeps no descriptor open. A caller that hands out memory at `address` must keep this object
    alive.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool) -> None:
        protection = _PROT_READ | (_PROT_WRITE if writable else 0)
        address = libc.mmap(_free_address(size_bytes), size_bytes, protection, _MAP_SHARED, fd, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            code = ctypes.get_errno()
            raise OSError(code, f"mapping {size_bytes} bytes of shared memory: {os.strerror(code)}")
        self.address: int = address
        self.size_bytes = size_bytes
        self._unpin: Callable[[], object] | None = None
        self._owner = os.getpid()

    def __del__(self, munmap: object = libc.munmap) -> None:
        # The default argument keeps the function reachable while the interpreter shuts down.
        if hasattr(self, "address"):
            if self._unpin is not None and os.getpid() == self._owner:  # a fork has no device
                self._unpin()
            munmap(self.address, self.size_bytes)  # type: ignore[operator]

    def pin(self, pin: Pin, *, read_only: bool) -> None:
        """Pin the memory until it is unmapped, so that a device copies faster. Its pages have to be allocated."""
        self._unpin = pin(self.view(0, self.size_bytes), read_only)

    def view(self, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return bytes of this mapping. The view does not keep the mapping alive."""
        if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > self.size_bytes:
            raise ValueError(f"[{offset_bytes}, +{size_bytes}) lies outside of a mapping of {self.size_bytes} bytes")
        return memoryview((ctypes.c_ubyte * size_bytes).from_address(self.address + offset_bytes)).cast("B")


def _free_address(size_bytes: int) -> int | None:
    """Return a free address, aligned for huge pages, or None if that is not needed or not possible.

    The address is a hint only: another thread may map memory there in the meantime.
    """
    if size_bytes < HUGE_PAGE_BYTES:
        return None
    found: int | None = libc.mmap(None, size_bytes + HUGE_PAGE_BYTES, 0, _MAP_NOTHING, -1, 0)
    if found is None or found == ctypes.c_void_p(-1).value:
        return None
    libc.munmap(found, size_bytes + HUGE_PAGE_BYTES)
    return -(-found // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def use_huge_pages(address: int, size_bytes: int) -> None:
    """Replace small pages in this part of a writable mapping by huge pages, for all processes that map it.

    Access to large tensors is faster then. If the kernel does not support this, or has no huge page left, nothing
    changes.
    """
    _advise(address, size_bytes, _MADV_COLLAPSE)


def begin_with_huge_pages(address: int, size_bytes: int) -> None:
    """Let the kernel use huge pages at the first touch of private memory, which halves its cost."""
    _advise(address, size_bytes, _MADV_HUGEPAGE)


def _advise(address: int, size_bytes: int, advice: int) -> None:
    start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    stop = (address + size_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if stop > start:
        libc.madvise(start, stop - start, advice)


def create_sealed(name: str, size_bytes: int) -> tuple[int, Mapping]:
    """Return a new memfd and its writable mapping; the memfd is sealed against all other processes.

    The caller closes the descriptor. Pages are allocated by `reserve`. Raises OutOfMemory.
    """
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _lacking(f"a segment of {size_bytes} bytes", error) from error
    try:
        os.ftruncate(fd, size_bytes)
        mapping = Mapping(fd, size_bytes, writable=True)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise _lacking(f"a segment of {size_bytes} bytes", error) from error
    return fd, mapping


def reserve(fd: int, offset_bytes: int, size_bytes: int) -> None:
    """Allocate the pages of this part of a memfd now. Raises OutOfMemory.

    Without this, the first write would end the process (SIGBUS) if the kernel has no page left.
    """
    try:
        os.posix_fallocate(fd, offset_bytes, size_bytes)
    except OSError as error:
        raise _lacking(f"{size_bytes} bytes of a segment", error) from error


_LIMITS = {
    errno.EMFILE: "this process may open no more descriptors (RLIMIT_NOFILE)",
    errno.ENFILE: "this system may open no more descriptors (fs.file-max)",
    errno.EFBIG: "the largest file that this process may make is smaller (RLIMIT_FSIZE)",
    errno.ENOMEM: "no memory or address space is left (RLIMIT_AS, vm.max_map_count, vm.overcommit_memory)",
    errno.ENOSPC: "no memory is left for shared memory",
}


def _lacking(what: str, error: OSError) -> OutOfMemory:
    reason = _LIMITS.get(error.errno or 0, error.strerror or str(error))
    return OutOfMemory(f"{what} could not be had: {reason}. Free tensors of empty(), or raise the limit")


def open_sealed(fd: int, size_bytes: int | None = None) -> Mapping:
    """Map another process's sealed memfd read-only. The caller may close the descriptor afterwards.

    Raises OutOfMemory. Raises ProtocolError if `fd` is no memfd, is smaller than `size_bytes`, or could still shrink:
    then reading could end in SIGBUS.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        actual_bytes = os.fstat(fd).st_size
    except OSError as error:
        raise ProtocolError(f"a passed descriptor is no shared memory ({error.strerror})") from error
    if not seals & fcntl.F_SEAL_SHRINK or actual_bytes < (size_bytes or 1):
        raise ProtocolError(
            f"a passed segment is not sealed, or has {actual_bytes} bytes where {size_bytes} were announced"
        )
    try:
        return Mapping(fd, size_bytes or actual_bytes, writable=False)
    except OSError as error:
        raise _lacking(f"a map of a peer's {actual_bytes} bytes", error) from error


def futex_wait(address: int, value: int, timeout_s: float) -> None:
    """Block while the 32-bit word at `address` equals `value`, at most `timeout_s`.

    Returns on a wake-up, a change, a signal or the timeout, so the caller must read the word again. The interpreter
    lock is released while waiting. A read-only mapping is enough.
    """
    seconds = int(timeout_s)
    timeout = ctypes.create_string_buffer(struct.pack("@qq", seconds, int((timeout_s - seconds) * 1e9)))
    result = libc.syscall(
        ctypes.c_long(_futex_number()),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAIT),
        ctypes.c_uint32(value),
        timeout,
        None,
        0,
    )
    if result < 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        raise _failed_futex()


def futex_wake_all(address: int) -> None:
    """Wake every waiter on the word, in all processes."""
    if _wake(_SYS_FUTEX or _futex_number(), address, _FUTEX_WAKE, 2**31 - 1) < 0:
        raise _failed_futex()


def _futex_number() -> int:
    if _SYS_FUTEX is None:
        raise OSError(errno.ENOSYS, f"the futex call's number on {platform.machine()} is not known here")
    return _SYS_FUTEX


def _failed_futex() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"futex: {os.strerror(code)}")


_SYS_FUTEX_WAITV = 449  # on every architecture
_WAITER = struct.Struct("@QQII")  # value, address, flags, reserved
_TIME = struct.Struct("@qq")
_SIZE_U32 = 2
_CLOCK_MONOTONIC = 1
_wait = libc["syscall"]
_wait.restype = ctypes.c_long
_wait.argtypes = [ctypes.c_long, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_char_p, ctypes.c_int]
_SIGNALS = (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)


def waits_available() -> tuple[bool, str]:
    """Return True if this host can wait on words in shared memory, and the reason for the answer."""
    if platform.machine() != "x86_64":
        return False, f"{platform.machine()} may show writes of others in another order"
    libc.syscall(ctypes.c_long(_SYS_FUTEX_WAITV), None, 0, 0, None, 0)
    if ctypes.get_errno() != errno.EINVAL:
        return False, "this kernel has no futex_waitv (Linux 5.16)"
    return True, "x86-64 with futex_waitv"


class Alarm:
    """A word that one thread changes and other threads wait on."""

    def __init__(self) -> None:
        self._word = ctypes.c_uint32(0)
        self.address = ctypes.addressof(self._word)

    @property
    def count(self) -> int:
        """Number of rings so far (32 bits). Pass it to `wait`."""
        return self._word.value

    def ring(self) -> None:
        """Wake every waiter. Only one thread may call this."""
        self._word.value += 1
        futex_wake_all(self.address)

    def wait(self, count: int, words: Sequence[tuple[int, int]], deadline_s: float) -> None:
        """Block while the alarm's count is `count` and each word `(address, value)` has its value.

        The words have 32 bits and lie in shared memory. Returns at `deadline_s` (time.monotonic()) at the latest; a
        signal may make it return earlier.
        """
        waiters = [_WAITER.pack(value, address, _SIZE_U32, 0) for address, value in (*words, (self.address, count))]
        seconds = int(deadline_s)
        until = _TIME.pack(seconds, int((deadline_s - seconds) * 1e9))
        if _wait(_SYS_FUTEX_WAITV, b"".join(waiters), len(waiters), 0, until, _CLOCK_MONOTONIC) >= 0:
            return
        if ctypes.get_errno() not in _SIGNALS:
            code = ctypes.get_errno()
            raise OSError(code, f"futex_waitv: {os.strerror(code)}")
