"""Streams, events, and the check that every access to device memory has a happens-before edge to those before it.

Each stream has a vector clock. A host thread has one, too: it holds what the thread itself has waited for. Submitting
work gives the stream what its thread knows; an event carries its stream's clock to those who wait for it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tests.support.late import private_names as private
from tests.support.late.faults import faults
from tests.support.late.memory import LOCK, MEMORY, Block
from tests.support.late.settings import settings

if TYPE_CHECKING:
    from tests.support.late.copies import LateCopy

PRIVATE_USE_TYPE = 20
"""Number of the device type in `torch.Stream`."""
Span = tuple[Block, tuple[int, int]]
"""Bytes of a block from the first to behind the last."""


class RaceError(RuntimeError):
    """An access without a happens-before edge to an earlier one."""


class Clock(dict[int, int]):
    """Number of a stream -> number of its operations that are known to be done."""

    def join(self, other: Clock) -> None:
        for stream, tick in other.items():
            if tick > self.get(stream, 0):
                self[stream] = tick


@dataclass(eq=False)
class Host:
    """A host thread, together with the threads of autograd that work for it."""

    name: str
    stream: Stream
    clock: Clock = field(default_factory=Clock)
    counts: Counter[str] = field(default_factory=Counter)
    error: BaseException | None = None
    """The error that a hook has raised on a thread of autograd."""
    captured: list[Any] | None = None
    """The work of the graph that is captured now."""


class Stream(torch.Stream):
    """A queue of the device. Kernels run at once, copies as late as is allowed."""

    clock: Clock
    copies: deque[LateCopy]
    landed: int
    busy_s: float
    hang: threading.Event | None

    def __new__(cls, device: object = None, *, priority: int = 0, **given: int) -> Stream:
        with LOCK:
            if given:  # from torch, which knows the number only
                return STREAMS[given["stream_id"]]
            made = super().__new__(cls, stream_id=len(STREAMS), device_index=0, device_type=PRIVATE_USE_TYPE)
            made.clock, made.copies, made.landed, made.busy_s, made.hang = Clock(), deque(), 0, 0.0, None
            STREAMS.append(made)
            return made

    def __init__(self, *_: object, **__: object) -> None: ...

    @property
    def number(self) -> int:
        return self.stream_id

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return bool(self.record_event().query())

    def record_event(self, event: Any = None) -> Any:
        made: Event = Event() if event is None else event
        made.record(self)
        return made

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def land(self, tick: int) -> None:
        """Carry out its copies up to an operation, which is done from then on."""
        while self.copies and self.copies[0].tick <= tick:
            self.copies.popleft().carry_out()
        self.landed = max(self.landed, tick)

    def __enter__(self) -> Stream:
        _entered().append(this_thread().stream)
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(_entered().pop())


class Event:
    """A mark behind the work that its stream has been given by then."""

    def __init__(self, device: object = None, *, enable_timing: bool = False, **_: bool) -> None:
        self._timed = enable_timing
        self._asked = 0
        self._stream: Stream | None = None
        self._clock = Clock()
        self._hang: threading.Event | None = None
        self._at_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        with LOCK:
            stream.clock.join(this_thread().clock)
            self._stream, self._clock, self._asked = stream, Clock(stream.clock), 0
            self._hang, self._at_s = stream.hang, stream.busy_s

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        with LOCK:
            stream.clock.join(self._clock)
            stream.busy_s = max(stream.busy_s, self._at_s)
            if self._hang is not None and not self._hang.is_set():
                stream.hang = self._hang

    def query(self) -> bool:
        """Return True once the work has landed; for work that nobody waited for, only after some questions."""
        faults.touch()
        if self._hang is not None and not self._hang.is_set():
            return False
        with LOCK:
            if not is_landed(self._clock) and self._asked < settings.patience:
                self._asked += 1
                return False
        know(self._clock)
        return True

    def synchronize(self) -> None:
        wait_for(self._clock, self._hang)

    def elapsed_time(self, end_event: Event) -> float:
        """Return the device's milliseconds from this event to a later one."""
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._stream is None or end_event._stream is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (is_landed(self._clock) and is_landed(end_event._clock)):
            raise RuntimeError("device not ready: wait for both events before calculating elapsed time")
        return (end_event._at_s - self._at_s) * 1e3


STREAMS: list[Stream] = []
DEFAULT = Stream()
HOSTS: list[Host] = []
RACES: list[str] = []
_local = threading.local()
_KEY = "tests.support.late.order"


def known() -> Clock:
    """Return what the calling thread has waited for, without making it a thread of the device."""
    return this_thread().clock if private.is_stashed_in_thread(_KEY) else Clock()


def _entered() -> list[Stream]:
    if not hasattr(_local, "entered"):
        _local.entered = []
    return _local.entered  # type: ignore[no-any-return]


def this_thread() -> Host:
    """Return the calling thread; in a thread of autograd, the thread that called `backward`."""
    if not private.is_stashed_in_thread(_KEY):
        host = Host(threading.current_thread().name, DEFAULT)
        HOSTS.append(host)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(host))  # torch 2.11 lets go of it once more than it takes it
        private.stash_in_thread(_KEY, host)
    return private.stashed_in_thread(_KEY)  # type: ignore[no-any-return]


def current_stream(device: object = None) -> Stream:
    return this_thread().stream


def set_stream(stream: Any) -> None:
    this_thread().stream = STREAMS[stream.stream_id]


def is_landed(clock: Clock) -> bool:
    return all(STREAMS[number].landed >= tick for number, tick in clock.items())


def land(clock: Clock) -> None:
    """Carry out all copies up to a clock, in the order of their numbers in each stream."""
    for number, tick in list(clock.items()):
        STREAMS[number].land(tick)


def know(clock: Clock) -> None:
    """Let everything up to a clock land, and the calling thread know it."""
    with LOCK:
        land(clock)
        this_thread().clock.join(clock)


def wait_for(clock: Clock, hang: threading.Event | None) -> None:
    """Block the calling thread until all work up to a clock has landed."""
    faults.touch()
    this_thread().counts["waits"] += 1
    while hang is not None and not hang.wait(0.05):
        faults.touch()
    know(clock)


def synchronize(device: object = None) -> None:
    """Block until every stream has landed. It counts as one wait."""
    with LOCK:
        everything, hang = Clock(), None
        for stream in STREAMS:
            everything.join(stream.clock)
            if stream.hang is not None and not stream.hang.is_set():
                hang = stream.hang
    wait_for(everything, hang)


def submit(what: str, reads: Iterable[Span], writes: Iterable[Span]) -> tuple[Stream, int]:
    """Append an operation to the current stream, check its accesses, and fill the memory that it needs."""
    host = this_thread()
    stream = host.stream
    stream.clock.join(host.clock)
    stream.hang = faults.count() or stream.hang
    tick = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
    for spans, is_write in ((reads, False), (writes, True)):
        for block, span in spans:
            _access(block, span, is_write, what, stream)
            while block.fills:
                block.fills[0].carry_out()
    return stream, tick


def _access(block: Block, span: tuple[int, int], is_write: bool, what: str, stream: Stream) -> None:
    """Compare an access with those before it, and note it."""
    start, stop = span
    gone = []
    for key, (tick, before) in block.accesses.items():
        first, last, number, wrote = key
        if first < stop and start < last and (wrote or is_write):
            if stream.clock.get(number, 0) < tick:
                race(
                    f"{what} on stream {stream.number} {_doing(is_write)} memory that {before} on stream {number} "
                    f"{_doing(wrote)}, and stream {stream.number} has not waited for it"
                )
            if is_write and start <= first and last <= stop:
                gone.append(key)
    for key in gone:
        del block.accesses[key]
    block.accesses[(start, stop, stream.number, is_write)] = (stream.clock[stream.number], what)


def _doing(is_write: bool) -> str:
    return "writes" if is_write else "reads"


def race(text: str) -> None:
    RACES.append(text)
    if settings.raises:
        raise RaceError(text)


def reap() -> None:
    """Take back freed memory, and look whether another stream than its own may still use it."""
    for block in MEMORY.freed():
        owner = STREAMS[block.stream]
        for (_, _, number, wrote), (tick, what) in block.accesses.items():
            is_safe = number == block.stream or number in block.recorded
            if not is_safe and owner.clock.get(number, 0) < tick and STREAMS[number].landed < tick:
                race(
                    f"memory of stream {block.stream} was freed while {what} on stream {number} {_doing(wrote)} it; "
                    f"keep the tensor, let stream {block.stream} wait, or call record_stream"
                )


class Timed:
    """A kernel or copy that runs on a stream: it moves the clock of the device."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._began_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._stream.busy_s += (time.thread_time() - self._began_s) * settings.slowness
