"""The environment of a launcher's or agent's process: read, and changed where another library leaves no other way, here
and nowhere else.

What workers are started with is built from this and the operator's options; see `worker_start.environment`.

SIGTERM, SIGINT, SIGHUP and SIGQUIT for a loop that waits on descriptors. For the main thread of a process.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager


def home() -> str | None:
    """Where runs are kept, if the user has named a folder."""
    return os.environ.get("ELASTRAIN_HOME")


def inherited(name: str, otherwise: str = "") -> str:
    """What a worker gets under a name that the user may have set."""
    return os.environ.get(name, otherwise)


def without(prefix: str) -> dict[str, str]:
    """All variables but those whose names begin so, for a program that must not see them."""
    return {name: value for name, value in os.environ.items() if not name.startswith(prefix)}


@contextmanager
def set_for_a_moment(name: str, value: str) -> Iterator[str | None]:
    """Libraries that read a variable when they are imported or called (gRPC, torchelastic) take no argument for it.

    Yields what was there before.
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield before
    finally:
        if before is None:
            del os.environ[name]  # the workers' scripts may use it, too
        else:
            os.environ[name] = before


def leave_outer_job() -> None:
    """Forget the worker in which this launcher was started: its workers belong to another job, with other options."""
    if "ELASTRAIN_AGENT" in os.environ:
        kept = ("ELASTRAIN_HOME", *(name for name in os.environ if name.endswith("_MARK")))
        for name in [name for name in os.environ if name.startswith("ELASTRAIN_") and name not in kept]:
            del os.environ[name]


def mark_all_children(mark: Mapping[str, str]) -> None:
    """A fork server copies this process's environment, and takes no other for what it starts."""
    os.environ.update(mark)


NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class StopSignals:
    """Takes the signals over until `close`; its descriptor is readable when one has come."""

    def __init__(self) -> None:
        self._former = ExitStack()
        self._out, into = socket.socketpair()
        for sock in (self._out, into):
            sock.setblocking(False)
            self._former.callback(sock.close)
        # What is ignored, as by `nohup` or a shell's `&`, stays so.
        for number in [each for each in NUMBERS if signal.getsignal(each) != signal.SIG_IGN]:
            self._former.callback(signal.signal, number, signal.signal(number, _noted_elsewhere))
        # Written to by the interpreter itself, so that a signal wakes a loop whatever it waits for.
        former = signal.set_wakeup_fd(into.fileno(), warn_on_full_buffer=False)
        self._former.callback(signal.set_wakeup_fd, former)

    def fileno(self) -> int:
        return self._out.fileno()

    def take(self) -> list[signal.Signals]:
        """Those that have come since."""
        return [signal.Signals(number) for number in self._out.recv(64) if number in NUMBERS]

    def close(self) -> None:
        """Whoever had the signals before has them again."""
        self._former.close()


def _noted_elsewhere(number: int, frame: object) -> None:
    """The wake-up descriptor has told the loop; this handler only keeps the default action away."""
