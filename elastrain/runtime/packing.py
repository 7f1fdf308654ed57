"""One thing as one piece of memory without a name: how a loader process hands a micro-batch to the training process.

The piece is a memfd. It holds the thing's pickle and, beside it, the bytes of its tensors and arrays, which are not
copied again when it is opened. Both processes are ours (one is a fork of the other): this is the one place of the
runtime that pickles, and nothing that comes from another member or a file may ever come here. No processes, no sockets.

    number of buffers, bytes of the pickle, bytes of each buffer      (8 bytes each)
    the pickle
    the buffers, each at a multiple of 64 bytes
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elastrain.comm.shm.memory import Mapping

_READ_UP_TO_BYTES = 64 << 10
"""Up to here a copy costs less than a map and its page faults: 39 us and 64; at four times this size, 255 and 140."""
_ALIGNED_BYTES = 64
"""As torch aligns its own tensors: what a kernel computes may depend on it."""
_PROTOCOL = 5  # the first with buffers beside the pickle


def pack(thing: Any) -> int:
    """A descriptor of a new memfd that holds the thing; the caller closes it.

    Of tensors the content travels, never the rest of their storage; strides stay where `Tensor.clone` keeps them.
    Tensors that share memory do not share it any more. Raises OSError, and whatever pickling raises.
    """
    buffers: list[memoryview] = []
    pickled = io.BytesIO()
    _Pickler(pickled, _PROTOCOL, buffer_callback=lambda buffer: buffers.append(buffer.raw())).dump(thing)
    sizes = [buffer.nbytes for buffer in buffers]
    head = array("Q", [len(buffers), pickled.tell(), *sizes]).tobytes() + pickled.getbuffer()
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
    """The thing. Its tensors and arrays are views of `memory`, and keep it. Raises whatever unpickling raises."""
    count, pickle_bytes = memory[:16].cast("Q")
    sizes = memory[16 : 16 + 8 * count].cast("Q").tolist()
    start = 16 + 8 * count
    offsets = _offsets(start + pickle_bytes, sizes)
    buffers = [memory[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
    return pickle.loads(memory[start : start + pickle_bytes], buffers=buffers)  # noqa: S301 - from a fork of ours


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


class _Pickler(pickle.Pickler):
    """Plain tensors by their content. NumPy's arrays go beside the pickle by themselves; all else as it always does."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not Tensor or not _is_plain(thing):
            return NotImplemented
        if not thing.is_leaf:
            raise RuntimeError(
                "a tensor with autograd's history can not leave its process: detach() it in the dataset or collate_fn"
            )
        content = thing.detach().resolve_conj().resolve_neg()
        if not content.is_contiguous():
            content = content.clone()
        flat = content.as_strided((content.numel(),), (1,)).view(torch.uint8).numpy().data
        how = (content.dtype, tuple(content.shape), content.stride(), thing.requires_grad)
        return _tensor, (pickle.PickleBuffer(flat), *how)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its content, dtype, shape and strides are all there is to it."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.__dict__
    )


def _tensor(
    buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool
) -> Tensor:
    """Not by `view`: a tensor that is nobody's view to autograd, as it was."""
    if not len(buffer):
        return torch.empty_strided(shape, strides, dtype=dtype, requires_grad=requires_grad)
    storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides).requires_grad_(requires_grad)
