"""SIGTERM, SIGINT, SIGHUP and SIGQUIT for a loop that waits on descriptors. For the main thread of a process."""

from __future__ import annotations

import signal
import socket
from contextlib import ExitStack

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
