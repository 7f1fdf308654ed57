"""Parts of a worker that fail on request: the device, the drives, the speed, and the spec of a replacement.

`FailingDevice` raises as torch does when a device fails. `FailingDrives` wraps the kernel's calls on this worker's
slabs. `Slowness` stretches each micro-batch. `altered` makes a replacement that does not fit the job.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elastrain.device import DevicePort
from elastrain.device.same_memory import HOST
from elastrain.offload.drives.posix import Calls
from elastrain.runtime.io.journal import Journal

_LARGE_BYTES = 1 << 50
"""More than any device has."""
_ENDLESS_CYCLES = 1 << 62


class FailingDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """A mode that fails once, at the first operation after `after` others since `begin(after)`.

    It works in the thread of the training loop only. Once it has begun it is never left. An accelerator fails by itself
    from then on, in every thread: it stays broken for this process. The host raises one RuntimeError.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._is_expected = self._is_entered = self._is_in_backward = self._has_failed = False
        self._left: int | None = None
        """Operations that still succeed; None before `begin`."""
        self._how, self._port = "error", cast("DevicePort", HOST)

    def expect(self) -> None:
        """Announce that `begin` will be called, perhaps within a backward. Any thread may call this."""
        self._is_expected = True

    def begin(self, after: int, how: str = "error", port: DevicePort = HOST) -> None:
        """Let the next `after` operations succeed, and the one after them fail.

        `how` is error, or memory: an allocation that no device has room for, after which the device still works.
        """
        self._left, self._how, self._port = after, how, port
        if not self._is_in_backward:
            self._enter()

    def around(
        self, backward: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[], AbstractContextManager[None]]:
        """Return `backward` wrapped so that its hooks may call `begin`.

        Autograd removes any mode that a hook has entered, so the mode has to be entered before the backward.
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
        """Enter the mode if a backward began it unexpectedly; leave it if nothing has begun."""
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
            if self._how == "memory":
                self._port.empty(_LARGE_BYTES, torch.uint8)
            break_device(self._port)
            raise RuntimeError(f"device error: unspecified launch failure in {function} (injected)")
        if self._left:
            self._left -= 1
        return function(*args, **(kwargs or {}))


def break_device(port: DevicePort) -> None:
    """Break an accelerator for this process, by an assertion of a kernel that fails. Raises the device's error.

    Returns if the device does not check assertions, as the host, and ROCm by default.
    """
    if not port.is_host:
        torch._assert_async(port.empty(1, torch.bool).zero_())
        port.synchronize()


def stall_device(port: DevicePort) -> str:
    """Submit a kernel that never ends to the current stream. Returns why that is impossible, or ""."""
    endless = getattr(torch.get_device_module(port.device), "_sleep", None)
    if endless is None:
        return f"{port.device} has no kernel that waits"
    endless(_ENDLESS_CYCLES)
    return ""


class FailingDrives:
    """Drives that fail on request. Nothing fails before `begin` or `flip_next`, which any thread may call."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._are_there = False
        self._clock, self._sleep = clock, sleep
        self._how, self._bytes_per_s, self._until_s = "", math.inf, -math.inf
        self._flips_left = 0

    def take_over(self) -> Calls:
        """Return the calls that the worker's I/O engines have to use."""
        self._are_there = True
        return Calls(pwritev=self._pwritev, preadv=self._preadv, fallocate=self._fallocate)

    def begin(self, how: str, bytes_per_s: float, for_s: float | None) -> str:
        """Begin to fail. `how` is full, failing or slow. Returns why that can have no effect, or ""."""
        self._how, self._bytes_per_s = how, bytes_per_s
        self._until_s = self._clock() + (math.inf if for_s is None else for_s)
        return self._problem()

    def flip_next(self) -> str:
        """Flip one bit of the next read. Returns why that can have no effect, or ""."""
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


USUAL = 8
"""Number of micro-batches without a delay from which `Slowness` takes the usual time."""


class Slowness:
    """A delay of each micro-batch. Any thread calls `begin`; the training loop's thread uses what `around` returns."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._factor, self._how, self._until_s = 1.0, "busy", 0.0
        self._last_s = 0.0
        """Seconds that the last micro-batch took without the delay."""
        self._usual_s: deque[float] = deque(maxlen=USUAL)
        """Seconds of each of the last micro-batches without a delay."""

    def begin(self, factor: float, how: str, for_s: float | None) -> None:
        """Make micro-batches take `factor` times as long, by sleeping or by busy waiting, for `for_s` seconds."""
        self._factor, self._how = factor, how
        self._until_s = self._clock() + (math.inf if for_s is None else for_s)

    def around(
        self, computing: Callable[[], AbstractContextManager[None]]
    ) -> Callable[[], AbstractContextManager[None]]:
        """Return `computing` with a delay before it: a micro-batch then takes `factor` times as long as the last.

        The last one counts as no longer than usual, the median of those that had no delay. Caches are cold after a
        delay, so on a shared machine each micro-batch may take longer than the one before, and would make the next
        delay longer.
        """

        @contextmanager
        def slowed() -> Iterator[None]:
            is_delayed = self._delay()
            began_s = self._clock()
            with computing():
                yield
            self._last_s = self._clock() - began_s
            if not is_delayed:
                self._usual_s.append(self._last_s)

        return slowed

    def _delay(self) -> bool:
        if self._clock() >= self._until_s:
            return False
        # The delay comes first: after the computation the result would be on its way already.
        until_s = self._clock() + (self._factor - 1.0) * min(self._last_s, self._usual())
        if self._how == "sleep":
            self._sleep(max(0.0, until_s - self._clock()))
        while self._clock() < until_s:
            pass
        return True

    def _usual(self) -> float:
        return median(self._usual_s) if self._usual_s else math.inf


_SETTINGS = {"config": "seed", "threads": "intra-op threads", "torch": "torch"}
"""Kind of mistake -> the setting that shows it. A wrong secret shows before the spec is sent."""


def altered(spec: Mapping[str, Any], wrong: str, journal: Journal) -> dict[str, Any]:
    """Return the spec with one setting changed, or unchanged if nothing is to be wrong or the job lacks the setting.

    The last case is written to the journal, because the user waits for a refusal that will not come.
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
