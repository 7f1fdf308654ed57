"""Drives that fail on request: the kernel's calls on this worker's slabs go through here."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Sequence

from elastrain.offload.engines.posix import Calls


class FailingDrives:
    """Nothing fails before `begin` or `flip_next`, which any thread may call."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._are_there = False
        self._clock, self._sleep = clock, sleep
        self._how, self._bytes_per_s, self._until_s = "", math.inf, -math.inf
        self._flips_left = 0

    def take_over(self) -> Calls:
        """For the engines that the worker opens."""
        self._are_there = True
        return Calls(pwritev=self._pwritev, preadv=self._preadv, fallocate=self._fallocate)

    def begin(self, how: str, bytes_per_s: float, for_s: float | None) -> str:
        """`how`: full, failing or slow. Returns why that can have no effect, or an empty sentence."""
        self._how, self._bytes_per_s = how, bytes_per_s
        self._until_s = self._clock() + (math.inf if for_s is None else for_s)
        return self._problem()

    def flip_next(self) -> str:
        """One bit of what is read next."""
        self._flips_left = 1
        return self._problem()

    def _problem(self) -> str:
        return (
            "" if self._are_there else "this worker has no drive: start the job with --memory-limit and --offload-dir"
        )

    def _pwritev(self, fd: int, views: Sequence[memoryview], offset_bytes: int) -> int:
        self._suffer(views, writes=True)
        return os.pwritev(fd, views, offset_bytes)

    def _preadv(self, fd: int, views: Sequence[memoryview], offset_bytes: int) -> int:
        self._suffer(views, writes=False)
        moved = os.preadv(fd, views, offset_bytes)
        if self._flips_left:
            self._flips_left -= 1
            middle = views[0].cast("B")
            middle[len(middle) // 2] ^= 1
        return moved

    def _fallocate(self, fd: int, offset_bytes: int, size_bytes: int) -> None:
        self._suffer((), writes=True)
        os.posix_fallocate(fd, offset_bytes, size_bytes)

    def _suffer(self, views: Sequence[memoryview], *, writes: bool) -> None:
        if self._clock() >= self._until_s:
            return
        if self._how == "slow":
            self._sleep(sum(view.nbytes for view in views) / self._bytes_per_s)
        elif self._how == "failing":
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (injected)")
        elif writes:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected)")
