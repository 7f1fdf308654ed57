"""Packing of an object into one memfd, to hand a micro-batch to the training process; and the order of loading.

The memfd holds the description of the object (see `batch_codec`) and the bytes of its tensors and arrays, which are not
copied again when it is opened. `Schedule` decides what is loaded next. No processes, no sockets.

    number of buffers, bytes of the description, per buffer 2 · bytes + (1 if it is read-only)      (8 bytes each)
    the description
    the buffers, each at a multiple of 64 bytes
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
"""Up to this size a copy is cheaper than a map and its page faults: 39 us against 64. At four times the size: 255, 140.
"""
_ALIGNED_BYTES = 64
"""Alignment of torch's own tensors. Results of kernels may depend on it."""


def pack(thing: Any) -> int:
    """Return the descriptor of a new memfd that holds the object. The caller closes it.

    Raises OSError, and ConfigError as `batch_codec.encode` does.
    """
    description, buffers = batch_codec.encode(thing)
    sizes = [buffer.nbytes for buffer in buffers]
    told = [buffer.nbytes << 1 | buffer.readonly for buffer in buffers]
    head = array("Q", [len(buffers), len(description), *told]).tobytes() + description
    fd = os.memfd_create("elastrain-micro-batch", os.MFD_CLOEXEC)
    try:
        for piece, offset in zip([memoryview(head), *buffers], [0, *_offsets(len(head), sizes)], strict=True):
            _write(fd, piece, offset)
    except BaseException:
        os.close(fd)
        raise
    return fd


def take(fd: int) -> memoryview:
    """Return the writable memory of a packed object, private once the descriptors are closed.

    It lives as long as the view.

    The caller closes the descriptor. Raises OSError.
    """
    size_bytes = os.fstat(fd).st_size
    if size_bytes > _READ_UP_TO_BYTES:
        return _mapped(fd, size_bytes)
    memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu").numpy().data  # a bytearray is not aligned
    os.preadv(fd, [memory], 0)
    return memory


def unpack(memory: memoryview) -> Any:
    """Return the object. Its tensors and arrays are views that keep `memory`. Raises ValueError if invalid."""
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
    """Return the offsets of buffers of these sizes behind `start` bytes."""
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
    memory.mapping = mapping  # type: ignore[attr-defined] # so that it stays as long as a view of it
    return memoryview(memory).cast("B")


Plan = Callable[[int], Sequence[int]]
"""Step -> the micro-batches that this member is now expected to compute, in its order. Called again and again."""
Request = tuple[int, int]
"""`(step, micro-batch)`."""
Loaded = TypeVar("Loaded")

_LOOKAHEAD_STEPS = 2
_UNDER_WAY_MOST = 64
"""Maximum number of requests under way. So few fit into the sockets' buffers that no sender ever blocks."""


class Schedule(Generic[Loaded]):
    """The choice of what to load next. Results may come in any order.

    At most `ahead` requests are under way or loaded, not counting the one that the training loop waits for.
    """

    def __init__(self, step: int, plan: Plan, *, ahead: int) -> None:
        self._step, self._plan, self._limit = step, plan, ahead
        self._wanted: Request | None = None
        self._under_way: set[Request] = set()
        self._loaded: dict[Request, Loaded] = {}
        self._taken: set[Request] = set()

    def want(self, request: Request) -> bool:
        """Note that the training loop waits for this request.

        Returns True if the caller has to send it before all others.

        It then counts as under way. Loading ahead starts at its step; results of earlier steps are dropped.
        """
        self._wanted = request
        self._advance(request[0])
        if request in self._loaded or request in self._under_way:
            return False
        self._under_way.add(request)
        return True

    def ahead(self) -> Iterator[Request]:
        """Yield further requests to send now, in this order. Each counts as under way once it was yielded."""
        for step in range(self._step, self._step + _LOOKAHEAD_STEPS):
            for micro_batch in self._plan(step):
                if len(self._under_way) >= _UNDER_WAY_MOST or len(self._under_way) + len(self._loaded) >= self._limit:
                    return
                request = (step, micro_batch)
                if not (request in self._taken or request in self._loaded or request in self._under_way):
                    self._under_way.add(request)
                    yield request

    def arrived(self, request: Request, loaded: Loaded) -> None:
        """Store a result, or drop it if it is no longer needed."""
        self._under_way.discard(request)
        if request[0] >= self._step or request == self._wanted:
            self._loaded[request] = loaded

    def take(self, request: Request) -> Loaded | None:
        """Return the result of a request, once; None if it has not come yet."""
        loaded = self._loaded.pop(request, None)
        if loaded is not None:
            self._taken.add(request)
        return loaded

    def _advance(self, step: int) -> None:
        if step > self._step:
            self._step = step
            self._loaded = {request: loaded for request, loaded in self._loaded.items() if request[0] >= step}
            self._taken = {request for request in self._taken if request[0] >= step}
