"""Micro-batches in a memfd, and the schedule of their loading.

A loader process packs each micro-batch into one memfd, and the training process maps it. Layout:

    number of buffers, bytes of the description, of each buffer 2 · bytes + (1 if read-only): 8 bytes each
    the description (`batch_codec`)
    the buffers, each at a multiple of 64 bytes

`Schedule` says which micro-batches the loader processes load next. It has no processes and no tensors.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from elastrain.comm.shm.shared_memory import Mapping
from elastrain.runtime.loader import batch_codec

_READ_UP_TO_BYTES = 64 << 10
"""Up to here a copy costs less than a map and its page faults: 39 us and 64; at four times this size, 255 and 140."""
_ALIGNED_BYTES = 64
"""As torch aligns its own tensors: what a kernel computes may depend on it."""


def pack(thing: Any) -> int:
    """Return the descriptor of a new memfd that holds the thing; the caller closes it.

    Raises OSError, and ConfigError as `batch_codec.encode` does.
    """
    description, buffers = batch_codec.encode(thing)
    sizes = [buffer.nbytes for buffer in buffers]
    head = (
        array(
            "Q", [len(buffers), len(description), *(buffer.nbytes << 1 | buffer.readonly for buffer in buffers)]
        ).tobytes()
        + description
    )
    fd = os.memfd_create("elastrain-micro-batch", os.MFD_CLOEXEC)
    try:
        for piece, offset in zip([memoryview(head), *buffers], [0, *_offsets(len(head), sizes)], strict=True):
            _write(fd, piece, offset)
    except BaseException:
        os.close(fd)
        raise
    return fd


def take(fd: int) -> memoryview:
    """The memory of a packed thing, writable, ours alone once the descriptors are closed. It lives as long as the view.

    The caller closes the descriptor. Raises OSError.
    """
    size_bytes = os.fstat(fd).st_size
    if size_bytes > _READ_UP_TO_BYTES:
        return _mapped(fd, size_bytes)
    memory = torch.empty(size_bytes, dtype=torch.uint8).numpy().data  # aligned, which a bytearray is not
    os.preadv(fd, [memory], 0)
    return memory


def unpack(memory: memoryview) -> Any:
    """The thing. Its tensors and arrays are views of `memory`, and keep it. Raises ValueError for what is none."""
    try:
        count, description_bytes = memory[:16].cast("Q")
        told = memory[16 : 16 + 8 * count].cast("Q").tolist()
        start = 16 + 8 * count
        offsets = _offsets(start + description_bytes, [size >> 1 for size in told])
        buffers = [memory[offset : offset + (size >> 1)] for offset, size in zip(offsets, told, strict=True)]
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"what a loader process has handed over cannot be read ({error})") from None
    buffers = [each.toreadonly() if size & 1 else each for each, size in zip(buffers, told, strict=True)]
    return batch_codec.decode(memory[start : start + description_bytes], buffers)


def _offsets(start: int, sizes: Sequence[int]) -> list[int]:
    """Where buffers of these sizes begin behind `start` bytes."""
    offsets = []
    for size in sizes:
        start = -(-start // _ALIGNED_BYTES) * _ALIGNED_BYTES
        offsets.append(start)
        start += size
    return offsets


def _write(fd: int, piece: memoryview, offset: int) -> None:
    while piece:  # the kernel takes 2 GiB at most
        written = os.pwrite(fd, piece, offset)
        piece, offset = piece[written:], offset + written


def _mapped(fd: int, size_bytes: int) -> memoryview:
    mapping = Mapping(fd, size_bytes, writable=True)
    memory = (ctypes.c_ubyte * size_bytes).from_address(mapping.address)
    memory.mapping = mapping  # type: ignore[attr-defined] # so that it stays as long as somebody looks at it
    return memoryview(memory).cast("B")


Plan = Callable[[int], Sequence[int]]
"""Step -> the micro-batches that this member is now expected to compute, in its order. Asked again and again."""
Request = tuple[int, int]
"""`(step, micro-batch)`."""
Loaded = TypeVar("Loaded")

_LOOKAHEAD_STEPS = 2
_UNDER_WAY_MOST = 64
"""Requests that wait in the kernel with their results: so few that sending either never waits for a reader."""


class Schedule(Generic[Loaded]):
    """Requests come back in any order. At most `ahead` are under way or loaded, beside what somebody waits for."""

    def __init__(self, step: int, plan: Plan, *, ahead: int) -> None:
        self._step, self._plan, self._limit = step, plan, ahead
        self._wanted: Request | None = None
        self._under_way: set[Request] = set()
        self._loaded: dict[Request, Loaded] = {}
        self._taken: set[Request] = set()

    def want(self, request: Request) -> bool:
        """Somebody waits for it. True: it has to be asked for, before all others; it counts as under way then.

        Loading ahead starts at its step; what belongs to earlier ones is let go.
        """
        self._wanted = request
        self._advance(request[0])
        if request in self._loaded or request in self._under_way:
            return False
        self._under_way.add(request)
        return True

    def ahead(self) -> Iterator[Request]:
        """What else to ask for now, in this order. It counts as under way once it was handed out."""
        for step in range(self._step, self._step + _LOOKAHEAD_STEPS):
            for micro_batch in self._plan(step):
                if len(self._under_way) >= _UNDER_WAY_MOST or len(self._under_way) + len(self._loaded) >= self._limit:
                    return
                request = (step, micro_batch)
                if not (request in self._taken or request in self._loaded or request in self._under_way):
                    self._under_way.add(request)
                    yield request

    def arrived(self, request: Request, loaded: Loaded) -> None:
        """It came. What nobody will ask for any more is dropped."""
        self._under_way.discard(request)
        if request[0] >= self._step or request == self._wanted:
            self._loaded[request] = loaded

    def take(self, request: Request) -> Loaded | None:
        """What was loaded for it, handed out once; None if it has not come yet."""
        loaded = self._loaded.pop(request, None)
        if loaded is not None:
            self._taken.add(request)
        return loaded

    def _advance(self, step: int) -> None:
        if step > self._step:
            self._step = step
            self._loaded = {request: loaded for request, loaded in self._loaded.items() if request[0] >= step}
            self._taken = {request for request in self._taken if request[0] >= step}
