"""The loader processes: forks of the training process that take requests and return packed micro-batches.

Any of them may be killed at any time: it is started again, and its request is sent again. They share three datagram
sockets, whose locks the kernel keeps: urgent requests, requests ahead of time, and results. A free process takes the
next request, so a slow one delays no other. A result is a memfd, which has no name that could stay behind. Deaths are
noticed in `receive` only. No threads, plans or samples here.
"""

from __future__ import annotations

import atexit
import errno
import mmap
import os
import select
import socket
import struct
import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch._utils import ExceptionWrapper

from elastrain.errors import ConfigError
from elastrain.runtime.loader import packing
from elastrain.runtime.loader.fork_server import ForkServer, ProcessEnded, how_it_ended
from elastrain.runtime.loader.packing import Request
from elastrain.runtime.loader.seeding import in_host_memory

Load = Callable[[int, int], Any]
"""`(step, micro-batch)` -> the collated micro-batch."""

Packed = memoryview | OSError | RuntimeError
"""A micro-batch, or OSError if this process had no room for it, or RuntimeError if loader processes died of it."""

at_sample: ContextVar[Callable[[int], None]] = ContextVar("at_sample", default=lambda sample: None)
"""A function that is called with each sample that a loader process begins, to name a sample that kills the process."""

here: ContextVar[int] = ContextVar("here", default=-1)
"""The number of this loader process; -1 in the training process."""

_FOR_EVER_MS = 1e9
"""Longest time that `poll` is given. Longer ones count as endless."""
_REQUEST = struct.Struct("qq")
_SAMPLE = struct.Struct("q")
_WORDS_BYTES = _REQUEST.size + _SAMPLE.size
_ONE_FD_BYTES = socket.CMSG_LEN(array("i").itemsize)
_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_CLOSE_TIMEOUT_S = 5.0
_NOTHING = (-1, -1)
NO_SAMPLE = -1
_DEATHS_MOST = 2
"""Maximum number of processes that may die of one sample."""
_DEATHS_IN_A_ROW = 4
"""Maximum number of deaths, per process, without a loaded micro-batch in between."""


class LoadFailed:
    """The exception being handled, with its traceback as text, to be raised again in the training process."""

    def __init__(self) -> None:
        self._wrapper = ExceptionWrapper(where="while loading a micro-batch")  # type: ignore[no-untyped-call]
        error = sys.exception()
        self._refusal = str(error) if isinstance(error, ConfigError) else ""

    def raise_again(self) -> None:
        """Raise the exception again.

        StopIteration becomes RuntimeError, because it would end the training loop's generator.
        """
        if self._refusal:
            raise ConfigError(self._refusal)
        try:
            self._wrapper.reraise()  # type: ignore[no-untyped-call]
        except StopIteration as error:
            raise RuntimeError(str(error)) from None

    def nameless(self) -> LoadFailed:
        """Replace an exception class that cannot be sent, such as one defined in a function, by RuntimeError."""
        self._wrapper.exc_type = RuntimeError
        return self


class LoaderProcesses:
    """`count` loader processes. They end with `close`, or with the thread that started them, however it ends.

    `tell` is called for each process that died and is started again.
    """

    def __init__(self, load: Load, count: int, tell: Callable[[str], None] = lambda sentence: None) -> None:
        # Both ends stay open here: the fork server reports deaths, not these sockets.
        self._urgent, self._planned, self._results = pairs = [_pair() for _ in range(3)]
        self._owner = os.getpid()
        self._count = count
        self._tell = tell
        self._under_way: dict[Request, bool] = {}
        """Requests without a result yet, in order -> True if the training loop waits for it."""
        self._came: deque[tuple[Request, Packed]] = deque()
        self._at_work = _AtWork(count)
        self._deaths = _Deaths(_DEATHS_IN_A_ROW * count)
        at_work, theirs = self._at_work, [theirs for _, theirs in pairs]
        if torch.get_default_device().type != "cpu":
            load = in_host_memory(load)
        self._fork_server = ForkServer(lambda slot: _serve(load, slot, at_work, *theirs), count)
        self._poll = select.poll()
        self._poll.register(self._results[0], select.POLLIN)
        self._poll.register(self._fork_server.fileno(), select.POLLIN)
        # Registered after multiprocessing's own handler, so it runs first. That one would send SIGTERM and wait.
        atexit.register(self._kill)

    def send(self, request: Request, *, urgent: bool = False) -> None:
        """Send a request; an `urgent` one is loaded before all others. The caller limits how many are under way."""
        self._under_way[request] = urgent
        (self._urgent if urgent else self._planned)[0].send(_REQUEST.pack(*request))

    def receive(self, *, wait_s: float) -> Iterator[tuple[Request, Packed]]:
        """Yield the results that have come. If there are none, block until something happens, at most for `wait_s`.

        Raises ForkServerEndedError; RuntimeError if processes die over and over.
        """
        timeout_ms = 0.0 if self._came else wait_s * 1000
        ready = {fd for fd, _ in self._poll.poll(None if timeout_ms > _FOR_EVER_MS else timeout_ms)}
        while (result := _result(self._results[0])) is not None:
            # A request that seemed lost was sent twice; both results are the same, bit for bit.
            if self._under_way.pop(result[0], None) is not None:
                self._deaths.note_loaded(result[0])
                self._came.append(result)
        if self._fork_server.fileno() in ready:
            self._came += filter(None, [self._replace(ended) for ended in self._fork_server.ended()])
        while self._came:
            yield self._came.popleft()

    def close(self) -> None:
        """End the processes: each finishes what it is loading, and is killed if that takes too long."""
        atexit.unregister(self._kill)
        for ours, _ in (self._urgent, self._planned):
            ours.shutdown(socket.SHUT_WR)
        self._fork_server.close(_CLOSE_TIMEOUT_S)
        for pair in (self._urgent, self._planned, self._results):
            for end in pair:
                end.close()
        self._at_work.close()

    def _kill(self) -> None:
        if os.getpid() == self._owner:  # not in a fork that the user's code made
            self._fork_server.kill()

    def _replace(self, ended: ProcessEnded) -> tuple[Request, Packed] | None:
        """Start a dead process again and repeat lost requests. Returns an error result if the request is given up."""
        how, request, sample = how_it_ended(ended.exit_code), *self._at_work.of(ended.slot)
        self._at_work.put(ended.slot, _NOTHING)
        self._deaths.count(how)
        self._tell(f"loader process {ended.slot + 1} of {self._count} (pid {ended.pid}) {how}; it is started again")
        self._fork_server.start(ended.slot)
        fatal = self._fatal(request, sample, how)
        self._ask_again()
        return fatal

    def _fatal(self, request: Request, sample: int, how: str) -> tuple[Request, Packed] | None:
        """Return an error result if the request must be given up.

        The message has no process numbers, so that it is the same on every member.
        """
        if request not in self._under_way or not self._deaths.is_last_of(request, sample):
            return None
        del self._under_way[request]
        step, micro_batch = request
        return request, RuntimeError(
            f"{_DEATHS_MOST} loader processes died one after the other while they loaded "
            f"{'' if sample == NO_SAMPLE else f'sample {sample} of '}micro-batch {micro_batch} of step {step}; "
            f"the last one {how}"
        )

    def _ask_again(self) -> None:
        """Send again all requests that neither wait for a process nor are being loaded.

        A process loses its request when it dies.
        """
        for _, theirs in (self._urgent, self._planned):
            while _taken_from(theirs):
                pass
        busy = self._at_work.all()
        for request, urgent in list(self._under_way.items()):
            if request not in busy:
                self.send(request, urgent=urgent)


class _Deaths:
    """A count of the deaths of loader processes: in a row, and by the sample that was being loaded."""

    def __init__(self, in_a_row_max: int) -> None:
        self._in_a_row_max = in_a_row_max
        self._since_a_result = 0
        self._of: dict[Request, Counter[int]] = {}
        """Deaths by sample, for each request under way."""

    def note_loaded(self, request: Request) -> None:
        """Reset the count in a row, and forget deaths during this request."""
        self._since_a_result = 0
        self._of.pop(request, None)

    def count(self, how: str) -> None:
        """Count one more death. Raises RuntimeError if too many processes died and nothing was loaded in between."""
        self._since_a_result += 1
        if self._since_a_result > self._in_a_row_max:
            raise RuntimeError(
                f"{self._since_a_result} loader processes have died and loaded nothing in between; the last one {how}"
            )

    def is_last_of(self, request: Request, sample: int) -> bool:
        """Count one more death at this sample of a request. Returns True if the request has to be given up."""
        deaths = self._of.setdefault(request, Counter())
        deaths[sample] += 1
        if deaths[sample] < _DEATHS_MOST:
            return False
        del self._of[request]
        return True


class _AtWork:
    """The request and the sample that each process is loading, in shared memory, so that they survive its death."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._memory = mmap.mmap(-1, count * _WORDS_BYTES)
        for slot in range(count):
            self.put(slot, _NOTHING)

    def put(self, slot: int, request: Request) -> None:
        """Set the request of a process."""
        _REQUEST.pack_into(self._memory, slot * _WORDS_BYTES, *request)
        self.come_to(slot, NO_SAMPLE)

    def come_to(self, slot: int, sample: int) -> None:
        """Set the sample of a process."""
        _SAMPLE.pack_into(self._memory, slot * _WORDS_BYTES + _REQUEST.size, sample)

    def of(self, slot: int) -> tuple[Request, int]:
        """Return the request and the sample of a process."""
        step, micro_batch = _REQUEST.unpack_from(self._memory, slot * _WORDS_BYTES)
        return (step, micro_batch), _SAMPLE.unpack_from(self._memory, slot * _WORDS_BYTES + _REQUEST.size)[0]

    def all(self) -> set[Request]:
        """Return the requests of all processes."""
        return {self.of(slot)[0] for slot in range(self._count)}

    def close(self) -> None:
        """Free the shared memory."""
        self._memory.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _result(results: socket.socket) -> tuple[Request, Packed] | None:
    try:
        # socket.recv_fds ignores its flags in Python 3.11.
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


def _serve(
    load: Load, slot: int, at_work: _AtWork, urgent: socket.socket, planned: socket.socket, results: socket.socket
) -> None:
    torch.set_num_threads(1)
    at_sample.set(lambda sample: at_work.come_to(slot, sample))
    here.set(slot)
    while request := _next_request(urgent, planned):
        at_work.put(slot, _REQUEST.unpack(request))
        fd = _packed(load, *_REQUEST.unpack(request))
        # Cleared before the result is sent: a request noted here would be neither lost nor sent again.
        at_work.put(slot, _NOTHING)
        socket.send_fds(results, [request], [fd])
        os.close(fd)


def _next_request(urgent: socket.socket, planned: socket.socket) -> bytes:
    """Return the next request, or b"" at the end. Another process may take the request that woke this one."""
    waiting = select.poll()
    waiting.register(urgent, select.POLLIN)
    waiting.register(planned, select.POLLIN)
    while True:
        waiting.poll()
        for requests in (urgent, planned):
            if (request := _taken_from(requests)) is not None:
                return request


def _taken_from(requests: socket.socket) -> bytes | None:
    """Return a request, b"" at the end, or None if there is none now."""
    try:
        return requests.recv(_REQUEST.size, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None


def _packed(load: Load, step: int, micro_batch: int) -> int:
    """Load and pack a micro-batch, or the exception that loading raised."""
    try:
        try:
            return packing.pack(load(step, micro_batch))
        except Exception as error:
            if (problem := _of_device(error)) is None:
                raise
            raise ConfigError(
                f"the dataset or collate_fn uses a device in a loader process ({problem}), which is a fork of the "
                "training process and cannot: return tensors in host memory and move them in the loop, as in "
                "batch.to(device, non_blocking=True), or use num_workers=0"
            ) from error
    except Exception:  # noqa: BLE001 - edge of the process
        failed = LoadFailed()
        try:
            return packing.pack(failed)
        except Exception:  # noqa: BLE001 - its class cannot be found by its name
            return packing.pack(failed.nameless())


def _of_device(error: BaseException | None) -> str | None:
    """Return the first line of a device's error among an exception and its causes, or None."""
    while error is not None:
        line = str(error).partition("\n")[0]
        if isinstance(error, torch.AcceleratorError) or (isinstance(error, RuntimeError) and "forked subpro" in line):
            return line
        error = error.__cause__ or error.__context__
    return None
