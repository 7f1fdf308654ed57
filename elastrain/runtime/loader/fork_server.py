"""The fork server of loader processes: a fork of the training process that was made before training began.

A process forked during training would inherit locks that other threads hold, and would keep every page that the
training process changes later. The fork server has one thread and only the data set. It starts processes on request,
and reports which have ended and how. It does not know what they do.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from elastrain.base.processes import die_with_parent

_ORDER = struct.Struct("q")
"""A slot in which to start a process, or one of the two commands below."""
_END_WITH_THE_LAST, _KILL_ALL = -1, -2
_ENDED = struct.Struct("qqq")
_KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class ProcessEnded:
    """The end of a process of the fork server. A negative `exit_code` is the number of the signal that killed it."""

    slot: int
    pid: int
    exit_code: int


class ForkServerEndedError(RuntimeError):
    """The fork server has ended with all its processes, and none can be started again."""


class ForkServer:
    """A process that runs `body(slot)` in a child for each of `count` slots, and again on `start`.

    All processes end with the thread that makes the server, however that thread ends.
    """

    def __init__(self, body: Callable[[int], None], count: int) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keep = _Keeper(body, os.getpid(), theirs, self._orders)
        self._process = multiprocessing.get_context("fork").Process(target=keep.run, args=(count,), daemon=True)
        try:
            self._process.start()
        except BaseException:
            self._orders.close()
            raise
        finally:
            theirs.close()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `ended` has something to report."""
        return self._orders.fileno()

    def start(self, slot: int) -> None:
        """Start a process for this slot."""
        self._order(slot)

    def ended(self) -> list[ProcessEnded]:
        """Return the processes that have ended since the last call.

        Raises ForkServerEndedError if the server has ended.
        """
        found: list[ProcessEnded] = []
        while True:
            try:
                told = self._orders.recv(_ENDED.size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            except ConnectionError:
                told = b""
            if not told:
                self._process.join()
                raise ForkServerEndedError(
                    f"the process from which loader processes are started (pid {self._process.pid}) "
                    f"{how_it_ended(self._process.exitcode or 0)}"
                )
            slot, pid, exit_code = _ENDED.unpack(told)
            found.append(ProcessEnded(slot=slot, pid=pid, exit_code=exit_code))

    def close(self, timeout_s: float) -> None:
        """Wait until all processes have ended, and kill those that have not ended in time."""
        self._order(_END_WITH_THE_LAST)
        self._process.join(timeout_s)
        if self._process.is_alive():
            self._order(_KILL_ALL)
            self._process.join(_KILL_TIMEOUT_S)
        self.kill()
        self._process.join()
        self._orders.close()

    def kill(self) -> None:
        """Kill the server and all its processes at once."""
        self._process.kill()

    def _order(self, order: int) -> None:
        with suppress(ConnectionError):  # the server has ended, as `ended` will report
            self._orders.send(_ORDER.pack(order))


def how_it_ended(exit_code: int) -> str:
    """Describe in words how a process with this exit code ended."""
    if exit_code == -signal.SIGKILL:
        return "was killed by SIGKILL; if no user or program sent it, the system or its cgroup is out of memory"
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}: see what it wrote to stderr"
    return f"ended by itself with exit code {exit_code}: see what it wrote to stderr"


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends, however that happens."""
    die_with_parent(signal.SIGKILL, parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # a signal to the whole group is meant for the training process
        signal.signal(number, signal.SIG_IGN)


class _Keeper:
    """The main loop of the fork server's process."""

    def __init__(self, body: Callable[[int], None], owner: int, orders: socket.socket, theirs: socket.socket) -> None:
        self._body, self._owner, self._orders, self._theirs = body, owner, orders, theirs
        self._running: dict[int, tuple[int, int]] = {}
        """pidfd -> (slot, process id)."""

    def run(self, count: int) -> None:
        """Serve orders until the last process has ended."""
        die_with(self._owner)
        self._theirs.close()
        self._poll = select.poll()
        self._poll.register(self._orders, select.POLLIN)
        for slot in range(count):
            self._start(slot)
        ending = False
        while self._running or not ending:
            for fd, _ in self._poll.poll():
                if fd != self._orders.fileno():
                    self._bury(fd)
                    continue
                number = self._next_order()
                ending = ending or number < 0
                if number >= 0:
                    self._start(number)
                elif number == _KILL_ALL:
                    for _, pid in self._running.values():
                        os.kill(pid, signal.SIGKILL)
                    self._poll.unregister(self._orders)

    def _next_order(self) -> int:
        try:
            order = self._orders.recv(_ORDER.size)
        except ConnectionError:  # the training process was killed before it had heard of all that have ended
            order = b""
        return int(_ORDER.unpack(order)[0]) if order else _KILL_ALL

    def _start(self, slot: int) -> None:
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(slot, me)
        pidfd = os.pidfd_open(pid)
        self._running[pidfd] = slot, pid
        self._poll.register(pidfd, select.POLLIN)

    def _bury(self, pidfd: int) -> None:
        slot, pid = self._running.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        with suppress(ConnectionError):  # the training process has just ended: its sockets close before this ends
            self._orders.send(_ENDED.pack(slot, pid, os.waitstatus_to_exitcode(status)))

    def _become(self, slot: int, parent: int) -> None:
        code = 1
        try:
            die_with(parent)
            self._orders.close()
            for pidfd in self._running:
                os.close(pidfd)
            self._body(slot)
            code = 0
        except BaseException:  # noqa: BLE001 - edge of the process
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)
