"""One thing as one piece of memory without a name: how a loader process hands a micro-batch to the training process.

The piece is a memfd. It holds the description of the thing (`described`) and, beside it, the bytes of its tensors and
arrays, which are not copied again when it is opened. No processes, no sockets.

    number of buffers, bytes of the description, bytes of each buffer      (8 bytes each)
    the description, in MessagePack
    the buffers, each at a multiple of 64 bytes
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import torch

from elastrain.comm.shm.memory import Mapping
from elastrain.errors import ConfigError
from elastrain.runtime.described import Describer, Restorer

_READ_UP_TO_BYTES = 64 << 10
"""Up to here a copy costs less than a map and its page faults: 39 us and 64; at four times this size, 255 and 140."""
_ALIGNED_BYTES = 64
"""As torch aligns its own tensors: what a kernel computes may depend on it."""


def pack(thing: Any) -> int:
    """A descriptor of a new memfd that holds the thing; the caller closes it.

    Of tensors the content travels, never the rest of their storage; strides stay where `Tensor.clone` keeps them.
    Tensors that share memory do not share it any more. Raises OSError, and ConfigError for what is no data, which names
    its place, such as `batch['x'][0]`.
    """
    describer = Describer()
    try:
        tree = describer.describe(thing)
    except Exception as error:
        raise ConfigError(f"{_place(describer.way())}: {error}") from error
    description, buffers = msgspec.msgpack.encode(tree), describer.buffers
    sizes = [buffer.nbytes for buffer in buffers]
    head = array("Q", [len(buffers), len(description), *sizes]).tobytes() + description
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
        sizes = memory[16 : 16 + 8 * count].cast("Q").tolist()
        start = 16 + 8 * count
        offsets = _offsets(start + description_bytes, sizes)
        buffers = [memory[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
        tree = msgspec.msgpack.decode(memory[start : start + description_bytes])
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"what a loader process has handed over cannot be read ({error})") from None
    return Restorer(buffers).restore(tree)


def _place(way: Sequence[Any]) -> str:
    return "batch" + "".join(_key_of(*pair) for pair in pairwise(way))


def _key_of(holder: Any, held: Any) -> str:
    is_listed = isinstance(holder, list | tuple | set | frozenset)
    named = holder.items() if isinstance(holder, dict) else enumerate(holder) if is_listed else ()
    return next((f"[{key!r}]" for key, value in named if value is held), "")


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
