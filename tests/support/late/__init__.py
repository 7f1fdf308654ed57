"""A device named `late`, in pure Python: a genuine PrivateUse1 device that is stricter than a GPU.

    from tests.support import late

    late.install()                              # once per process, before the device is used
    model = model.to("late")                    # digests equal the CPU's
    late.stats()["waits"]                       # counters of all threads; late.stats("MainThread") of one
    late.races()                                # accesses without a happens-before edge; each has raised RaceError, too
    late.configure(capacity_bytes=1 << 20, name="Late B", uuid="late-b", capability=(2, 0), slowness=10)
    late.fail_at(20)                            # the 20th operation from now breaks the device for this process
    late.hang_at(20); late.release()            # a stream that never ends, until it is released

Streams, events, random numbers and figures of memory are in `torch.late`, with the names that `torch.cuda` has. The
environment variable LATE holds settings as JSON for processes that a test does not start itself. README.md says what
this device cannot show.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.support.late import autocast, composites, hooks, module, registration, threads
from tests.support.late.faults import faults
from tests.support.late.memory import LOCK, MEMORY, NAME
from tests.support.late.order import HOSTS, RACES, STREAMS, RaceError, reap
from tests.support.late.settings import Settings, settings
from tests.support.late.threads import handing_over

__all__ = [
    "NAME",
    "RaceError",
    "Settings",
    "configure",
    "fail_at",
    "handing_over",
    "hang_at",
    "install",
    "keep_from_compiler",
    "operations",
    "races",
    "release",
    "repair",
    "stats",
]
_installed = False


def install() -> None:
    """Make `late` a device of this process. A second call does nothing."""
    global _installed
    if not _installed:
        module.set_up()
        registration.register()
        hooks.register()
        composites.register()
        autocast.register()
        threads.watch_standard_library()
        _installed = True


def keep_from_compiler() -> None:
    """Keep torch's compiler away from the device's own Python code. Imports the compiler."""
    from torch._dynamo import trace_rules

    trace_rules.add(__name__)


def configure(**values: Any) -> None:
    """Change settings of the device; `settings.Settings` lists them."""
    settings.change(values)


def stats(thread: str | None = None) -> Counter[str]:
    """Return what one thread, or all, have asked of the device.

    Returns:
        Counts by name: kernels, waits, copies_out, copies_in, copies_within, bytes_out, bytes_in. A wait is a call that
        may block the thread until the device has finished something. Threads of autograd count as the thread that
        called `backward`.
    """
    total: Counter[str] = Counter()
    for host in list(HOSTS):
        if thread in (None, host.name):
            total.update(host.counts)
    return total


def races(forget: bool = False) -> list[str]:
    """Return the races that were found so far, in the order in which they were found."""
    with LOCK:
        try:
            reap()
        except RaceError:
            pass  # it is in the list
        found = list(RACES)
        if forget:
            RACES.clear()
        return found


def operations() -> int:
    """Return the number of operations so far: kernels, and copies from and to the host."""
    return faults.operations


def fail_at(count: int) -> None:
    """Break the device at the `count`-th operation from now on: every use of it raises torch.AcceleratorError."""
    settings.fail_at = faults.operations + count


def hang_at(count: int) -> None:
    """Let the stream of the `count`-th operation from now on never end."""
    settings.hang_at = faults.operations + count


def release() -> None:
    """Let the streams that never end go on."""
    faults.hang.set()
    with LOCK:
        for stream in STREAMS:
            stream.hang = None
        faults.hang = type(faults.hang)()


def repair() -> None:
    """Make a device that is broken whole again, which no real device is before its process ends."""
    faults.broken = ""


def peak_bytes() -> int:
    return MEMORY.peak_bytes
