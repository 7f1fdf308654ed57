"""The loader processes: forks of the training process that take requests and hand back packed micro-batches.

Any of them may be killed at any time. What they share are three datagram sockets, whose locks the kernel keeps: one for
requests that somebody waits for, one for those ahead of time, one for results. Whoever is free takes the next request,
so that a slow one delays nobody else. A result is a memfd, which has no name that could stay behind. Deaths are read
from pidfds, in `receive` only. No threads here, and nothing about plans or samples.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import multiprocessing
import os
import select
import signal
import socket
import struct
import time
from array import array
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from typing import Any

import torch
from torch._utils import ExceptionWrapper

from elastrain.runtime import packing
from elastrain.runtime.schedule import Request

Load = Callable[[int, int], Any]
"""`(step, micro-batch)` -> the collated micro-batch."""

Packed = memoryview | OSError
"""A micro-batch, or why this process had no room for it."""

_REQUEST = struct.Struct("qq")
_ONE_FD_BYTES = socket.CMSG_LEN(array("i").itemsize)
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_PR_SET_PDEATHSIG = 1
_CLOSE_TIMEOUT_S = 5.0


class Failed:
    """The exception under way, with its traceback as text, on its way to whoever asks for the micro-batch."""

    def __init__(self) -> None:
        self._wrapper = ExceptionWrapper(where="while loading a micro-batch")  # type: ignore[no-untyped-call]

    def raise_again(self) -> None:
        """Raise it, but for what would silently end the generator that the training loop iterates over."""
        try:
            self._wrapper.reraise()  # type: ignore[no-untyped-call]
        except StopIteration as error:
            raise RuntimeError(str(error)) from None

    def nameless(self) -> Failed:
        """The same for an exception whose class can not travel (it was defined in a function)."""
        self._wrapper.exc_type = RuntimeError
        return self


class LoaderProcesses:
    """`count` processes that end with the thread that starts them, however it ends, or with `close`."""

    def __init__(self, load: Load, count: int) -> None:
        # Both ends stay open here: that a process has died is said by its pidfd alone.
        self._urgent, self._planned, self._results = pairs = [_pair() for _ in range(3)]
        self._owner = os.getpid()
        self._processes: list[ForkProcess] = []
        self._pidfds: list[int] = []
        self._poll = select.poll()
        self._poll.register(self._results[0], select.POLLIN)
        context = multiprocessing.get_context("fork")
        try:
            for _ in range(count):
                theirs = [theirs for _, theirs in pairs]
                self._processes.append(process := context.Process(target=_serve, args=(load, self._owner, *theirs)))
                process.daemon = True
                process.start()
                self._pidfds.append(pidfd := os.pidfd_open(process.pid or 0))
                self._poll.register(pidfd, select.POLLIN)
        except BaseException:
            self.close()
            raise
        # Before multiprocessing's own, registered earlier, which would ask them by SIGTERM and wait.
        atexit.register(self._kill)

    def send(self, request: Request, *, urgent: bool = False) -> None:
        """Have it loaded, before all that nobody waits for if `urgent`. The caller limits how many are under way."""
        (self._urgent if urgent else self._planned)[0].send(_REQUEST.pack(*request))

    def receive(self, *, wait: bool) -> Iterator[tuple[Request, Packed]]:
        """What has come; `wait` until there is something. Raises RuntimeError if a process has ended."""
        ready = {fd for fd, _ in self._poll.poll(None if wait else 0)}
        for number, pidfd in enumerate(self._pidfds):
            if pidfd in ready:
                raise RuntimeError(self._how_it_ended(number))
        while (result := _result(self._results[0])) is not None:
            yield result

    def close(self) -> None:
        """End the processes: each when it has finished what it is loading, or is killed when that takes too long."""
        atexit.unregister(self._kill)
        for ours, _ in (self._urgent, self._planned):
            ours.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for process in self._processes:
            if process.pid is not None:
                process.join(max(0.0, deadline - time.monotonic()))
                process.kill()
                process.join()
        for pidfd in self._pidfds:
            os.close(pidfd)
        for pair in (self._urgent, self._planned, self._results):
            for end in pair:
                end.close()

    def _kill(self) -> None:
        if os.getpid() == self._owner:  # not in a fork of the user's own
            for process in self._processes:
                process.kill()

    def _how_it_ended(self, number: int) -> str:
        process = self._processes[number]
        process.join()
        who = f"loader process {number + 1} of {len(self._processes)} (pid {process.pid})"
        code = process.exitcode
        if code == -signal.SIGKILL:
            return f"{who} was killed by SIGKILL; if nobody did that, the system or its cgroup is out of memory"
        if code is not None and code < 0:
            return f"{who} was ended by {signal.Signals(-code).name}: see what it wrote to stderr"
        return f"{who} ended by itself with exit code {code}: see what it wrote to stderr"


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _result(results: socket.socket) -> tuple[Request, Packed] | None:
    try:
        # Not socket.recv_fds, which takes no notice of its flags in Python 3.11.
        data, passed, _, _ = results.recvmsg(_REQUEST.size, _ONE_FD_BYTES, _AT_ONCE)
    except BlockingIOError:
        return None
    step, micro_batch = _REQUEST.unpack(data)
    return (step, micro_batch), _taken([fd for _, _, fds in passed for fd in array("i", fds)])


def _taken(fds: list[int]) -> Packed:
    if not fds:
        return OSError(errno.EMFILE, "no descriptor is left for a loaded micro-batch (RLIMIT_NOFILE)")
    try:
        return packing.take(fds[0])
    except OSError as error:
        return error
    finally:
        os.close(fds[0])


# ------------------------------------------------------------------------------------------------- in a loader process


def _serve(load: Load, parent: int, urgent: socket.socket, planned: socket.socket, results: socket.socket) -> None:
    _die_with(parent)
    while request := _next_request(urgent, planned):
        fd = _packed(load, *_REQUEST.unpack(request))
        socket.send_fds(results, [request], [fd])
        os.close(fd)


def _die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever signals the whole group means the training process
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def _next_request(urgent: socket.socket, planned: socket.socket) -> bytes:
    """Empty when there are no more. Others wait for the same sockets: what woke this one may be gone."""
    waiting = select.poll()
    waiting.register(urgent, select.POLLIN)
    waiting.register(planned, select.POLLIN)
    while True:
        waiting.poll()
        for requests in (urgent, planned):
            try:
                return requests.recv(_REQUEST.size, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass


def _packed(load: Load, step: int, micro_batch: int) -> int:
    """What was loaded, or the error with which that ended: raised again in the training process, when asked for."""
    try:
        return packing.pack(load(step, micro_batch))
    except Exception:  # noqa: BLE001 - edge of the process
        failed = Failed()
        try:
            return packing.pack(failed)
        except Exception:  # noqa: BLE001 - its class is not to be found by a name
            return packing.pack(failed.nameless())
