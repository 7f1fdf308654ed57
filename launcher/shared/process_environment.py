"""Environment variables and stop signals of a launcher's or agent's process.

This is the only module that reads or changes the process environment. Variables are changed only if a library offers no
other way. Workers get an environment built from this one and the operator's options; see `worker_start.environment`.
`StopSignals` is for the main thread of a process.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from elastrain.base.processes import say
from elastrain.errors import ConfigError


def home() -> str | None:
    """Return the folder for runs that the user has named in ELASTRAIN_HOME, or None."""
    return os.environ.get("ELASTRAIN_HOME")


def inherited(name: str, otherwise: str = "") -> str:
    """Return the variable from this process's environment, or `otherwise`. The user may set it for workers."""
    return os.environ.get(name, otherwise)


def without(prefix: str) -> dict[str, str]:
    """Return all variables except those whose names begin with `prefix`, for a program that must not see these."""
    return {name: value for name, value in os.environ.items() if not name.startswith(prefix)}


def slurm() -> dict[str, str]:
    """Return the variables of Slurm, and those that a batch script of `elastrain launch slurm` sets."""
    return {name: value for name, value in os.environ.items() if name.startswith(("SLURM", "ELASTRAIN_SLURM"))}


def in_a_pod() -> bool:
    """Return True in a container of Kubernetes, which tells each one where its API is."""
    return "KUBERNETES_SERVICE_HOST" in os.environ


@contextmanager
def set_for_a_moment(name: str, value: str) -> Iterator[str | None]:
    """Set a variable inside a `with` block, and yield its former value.

    gRPC reads some variables on import or in a call, and takes no argument for it.
    """
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield before
    finally:
        if before is None:
            del os.environ[name]  # workers' scripts may read it, too
        else:
            os.environ[name] = before


def leave_outer_job() -> None:
    """Remove the variables of an outer job, if this launcher was started inside one of its workers.

    The new job's workers must not inherit the other job's options.
    """
    if "ELASTRAIN_AGENT" in os.environ:
        kept = ("ELASTRAIN_HOME", *(name for name in os.environ if name.endswith("_MARK")))
        for name in [name for name in os.environ if name.startswith("ELASTRAIN_") and name not in kept]:
            del os.environ[name]


def mark_all_children(mark: Mapping[str, str]) -> None:
    """Set the mark for all child processes: a fork server copies this process's environment to them."""
    os.environ.update(mark)


NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that stop a job."""


_heard: list[signal.Signals] = []


def stop(number: int, _frame: object) -> None:
    """End with a sentence on a signal. `StopSignals` replaces this handler, and restores it at its end.

    Python ignores an exception inside a finalizer, and while modules are imported some finalizers run. The signal is
    therefore kept: `StopSignals` hears it, if the command has gone on.
    """
    say(f"stopped by {signal.Signals(number).name}")
    _heard.append(signal.Signals(number))
    raise SystemExit(128 + number)


class StopSignals:
    """A handler of the stop signals until `close`. Its descriptor becomes readable when a signal has arrived."""

    def __init__(self) -> None:
        self._former = ExitStack()
        self._out, into = socket.socketpair()
        for sock in (self._out, into):
            sock.setblocking(False)
            self._former.callback(sock.close)
        # The interpreter itself writes to this descriptor, so a signal always wakes the loop. It is set before the
        # handlers, because a signal between the two would be lost.
        former = signal.set_wakeup_fd(into.fileno(), warn_on_full_buffer=False)
        self._former.callback(signal.set_wakeup_fd, former)
        # A signal that is ignored, as under `nohup` or a shell's `&`, stays ignored.
        for number in [each for each in NUMBERS if signal.getsignal(each) != signal.SIG_IGN]:
            self._former.callback(signal.signal, number, signal.signal(number, _noted_elsewhere))
        if _heard:
            into.send(bytes(_heard))

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._out.fileno()

    def take(self) -> list[signal.Signals]:
        """Return the signals that have arrived since the last call."""
        return [signal.Signals(number) for number in self._out.recv(64) if number in NUMBERS]

    def close(self) -> None:
        """Restore the former signal handlers."""
        self._former.close()


def _noted_elsewhere(number: int, frame: object) -> None:
    """Do nothing: the wake-up descriptor informs the loop. This handler only replaces the default action."""


def missing_extra(what: str, extra: str, error: ModuleNotFoundError) -> ConfigError:
    """Return the error of a feature whose library is not installed, with the command that installs it."""
    return ConfigError(f"{what} needs {error.name}, which is not installed: pip install 'elastrain[{extra}]'")
