"""A device that fails: from some operation on, torch raises as it does then.

Drives that fail on request: the kernel's calls on this worker's slabs go through here.

A worker that is slower than it could be: each micro-batch takes a multiple of its time.

A replacement that does not fit the job: what it says of itself differs in one thing.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from elastrain.offload.drives.posix import Calls
from elastrain.runtime.io.journal import Journal


class FailingDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """After `begin(after)`, the first operation after `after` others raises RuntimeError, once; before, none does.

    In the thread of the training loop only. It is never left once it has begun.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._is_expected = self._is_entered = self._is_in_backward = self._has_failed = False
        self._left: int | None = None
        """Operations that still succeed; None before `begin`."""

    def expect(self) -> None:
        """Any thread: `begin` will be called, perhaps within a backward."""
        self._is_expected = True

    def begin(self, after: int) -> None:
        self._left = after
        if not self._is_in_backward:
            self._enter()

    def around(
        self, backward: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[], AbstractContextManager[None]]:
        """`backward`, in whose hooks `begin` may be called.

        Autograd takes away whatever mode a hook has entered: the mode has to be there before the backward.
        """

        @contextmanager
        def failing() -> Iterator[None]:
            if self._is_expected:
                self._enter()
            self._is_in_backward = True
            try:
                with backward():
                    yield
            finally:
                self._is_in_backward = False
                self._settle()

        return failing

    def _settle(self) -> None:
        """Enter what was begun in a backward that did not expect it; leave what has not begun."""
        if self._left is not None:
            self._enter()
        elif self._is_entered:
            self._is_entered = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # as above

    def _enter(self) -> None:
        if not self._is_entered:
            self._is_entered = True
            self.__enter__()  # type: ignore[no-untyped-call]  # as above

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._left == 0 and not self._has_failed:
            self._has_failed = True
            raise RuntimeError(f"device error: unspecified launch failure in {function} (injected)")
        if self._left:
            self._left -= 1
        return function(*args, **(kwargs or {}))


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


class Slowness:
    """`begin` in any thread; `around` wraps what surrounds each micro-batch, in the training loop's."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._factor, self._how, self._until_s = 1.0, "busy", 0.0
        self._last_s = 0.0
        """What the last micro-batch took by itself."""

    def begin(self, factor: float, how: str, for_s: float | None) -> None:
        self._factor, self._how = factor, how
        self._until_s = self._clock() + (math.inf if for_s is None else for_s)

    def around(
        self, computing: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[], AbstractContextManager[None]]:
        """`computing`, after a delay that makes this micro-batch so many times as long as the one before it was."""

        @contextmanager
        def slowed() -> Iterator[None]:
            self._delay()
            began_s = self._clock()
            with computing():
                yield
            self._last_s = self._clock() - began_s

        return slowed

    def _delay(self) -> None:
        if self._clock() >= self._until_s:
            return
        # Before the computation: afterwards its result would be on its way already.
        until_s = self._clock() + (self._factor - 1.0) * self._last_s
        if self._how == "sleep":
            self._sleep(max(0.0, until_s - self._clock()))
        while self._clock() < until_s:
            pass


_SETTINGS = {"config": "seed", "threads": "intra-op threads", "torch": "torch"}
"""What is wrong -> the setting that shows it. A wrong secret shows before anything is said."""


def altered(spec: Mapping[str, Any], wrong: str, journal: Journal) -> dict[str, Any]:
    """The spec with another value in the setting; as it is where nothing is to be wrong, or the job has no such one.

    The last is written down: who asked for it waits for a refusal that will not come.
    """
    name = _SETTINGS.get(wrong)
    if name is None:
        return dict(spec)
    if name not in spec:
        why = f"this job does not compare {name} (deterministic=False): the replacement fits and is admitted"
        journal.write("fault_refused", kind="wrong-replacement", reason=why)
        return dict(spec)
    value = spec[name]
    return {**spec, name: f"{value}+altered" if isinstance(value, str) else value + 1}
