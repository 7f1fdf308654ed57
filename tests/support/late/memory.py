"""Device memory: addresses that no code may touch, and CPU storages behind them that only this package finds."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from tests.support.late import private_names as private
from tests.support.late.settings import settings

NAME = "late"
GRAIN = 512
"""Bytes; sizes and addresses are multiples of it."""
RANGE_BYTES = 1 << 44
_SLOT_BYTES = 128
_SLOTS = 1 << 20
_EXTENSION_DEVICE = 12
_TOUCHED_BY_NOBODY = (0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # PROT_NONE; MAP_NORESERVE
_OF_INTEGERS, _OF_UNSIGNED, _OF_FLOATS, _OF_BFLOATS, _OF_COMPLEX, _OF_BOOL = 0, 1, 2, 4, 5, 6
_DLPACK = {
    torch.float16: (_OF_FLOATS, 16),
    torch.float32: (_OF_FLOATS, 32),
    torch.float64: (_OF_FLOATS, 64),
    torch.bfloat16: (_OF_BFLOATS, 16),
    torch.complex64: (_OF_COMPLEX, 64),
    torch.complex128: (_OF_COMPLEX, 128),
    torch.bool: (_OF_BOOL, 8),
    torch.uint8: (_OF_UNSIGNED, 8),
    torch.int8: (_OF_INTEGERS, 8),
    torch.int16: (_OF_INTEGERS, 16),
    torch.int32: (_OF_INTEGERS, 32),
    torch.int64: (_OF_INTEGERS, 64),
}

LOCK = threading.RLock()
"""Held by whoever submits or carries out work, so that kernels of one process run one after the other."""
os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


class _Description(ctypes.Structure):
    """DLManagedTensor, with its one size and one stride behind it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    )


@dataclass(eq=False)
class Block:
    """One allocation: its address, its bytes, and what streams have done with it."""

    base: int
    nbytes: int
    host: torch.UntypedStorage
    stream: int
    """Number of the stream that was current when it was allocated."""
    accesses: dict[tuple[int, int, int, bool], tuple[int, str]] = field(default_factory=dict)
    """First byte, byte behind the last, stream, whether it writes -> tick of that stream, operator."""
    fills: list[Any] = field(default_factory=list)
    """Copies into it that have not been carried out."""
    recorded: set[int] = field(default_factory=set)
    """Streams that `record_stream` named."""
    room: int = field(init=False)
    """Bytes of its addresses."""
    owners: int = 1
    """Number of storages of torch over it: more than one, if a process reads the same memory of a peer twice."""
    is_shared: bool = False
    """True for memory that other processes read, or that is another's: its bytes are counted where they are mapped."""

    def __post_init__(self) -> None:
        self.room = max(-(-self.nbytes // GRAIN), 1) * GRAIN


class Memory:
    """All allocations of the device. Its caller holds LOCK."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._next = libc.mmap(None, RANGE_BYTES, *_TOUCHED_BY_NOBODY, -1, 0)
        if self._next in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "late cannot reserve its addresses")
        self._end = self._next + RANGE_BYTES
        # torch calls the deleter anywhere, also at the interpreter's end, so it must not be Python: the C library's
        # sem_post adds one to the word at its argument, the slot's first word, and `free` finds it there later.
        self._deleter = ctypes.cast(libc.sem_post, ctypes.c_void_p).value
        # Private, because forked processes that share it would free each other's memory.
        self._arena = mmap.mmap(-1, _SLOT_BYTES * _SLOTS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._arena_base = ctypes.addressof(ctypes.c_char.from_buffer(self._arena))
        self._words = numpy.frombuffer(self._arena, dtype=numpy.int32)[:: _SLOT_BYTES // 4]
        self._used: list[Block | None] = []
        self._empty_slots: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.live_bytes = self.peak_bytes = 0

    def adopt(self, host: torch.UntypedStorage, stream: int) -> Block:
        """Give a CPU storage an address on the device. Raises torch.OutOfMemoryError beyond the capacity."""
        rounded = self.check_room(host.nbytes())
        if self._next + max(rounded, GRAIN) > self._end:
            raise RuntimeError("late has used up its addresses: it never gives one out twice")
        block = Block(self._next, host.nbytes(), host, stream)
        self._next += max(rounded, GRAIN)
        self.blocks[block.base] = block
        self.live_bytes += rounded
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return block

    def check_room(self, nbytes: int) -> int:
        """Return the bytes that an allocation takes. Raises torch.OutOfMemoryError beyond the capacity."""
        rounded = -(-nbytes // GRAIN) * GRAIN
        if self.live_bytes + rounded > settings.capacity_bytes:
            raise torch.OutOfMemoryError(
                f"LATE out of memory. Tried to allocate {nbytes} bytes. Device 0 has a capacity of "
                f"{settings.capacity_bytes} bytes, of which {self.live_bytes} bytes are allocated."
            )
        return rounded

    def flat(self, block: Block, dtype: torch.dtype) -> Tensor:
        """Return the only tensor that owns the block: its whole storage in one dimension."""
        if dtype not in _DLPACK:
            raise NotImplementedError(f"late has no tensors of {dtype}")
        slot = self._slot()
        address = self._arena_base + slot * _SLOT_BYTES
        made = _Description.from_address(address)
        made.data, made.device_type, made.device_id, made.ndim = block.base, _EXTENSION_DEVICE, 0, 1
        (made.code, made.bits), made.lanes = _DLPACK[dtype], 1
        made.size, made.stride, made.byte_offset = block.nbytes // dtype.itemsize, 1, 0
        made.shape, made.strides = address + _Description.size.offset, address + _Description.stride.offset
        made.context, made.deleter = None, self._deleter
        flat = from_dlpack(_new_capsule(address, b"dltensor", None))
        ctypes.memset(address, 0, 32)  # A semaphore at zero: torch does not read the description again.
        self._used[slot] = block
        return flat

    def resize(self, block: Block, nbytes: int) -> None:
        """Free the bytes of a block, or give it new ones, at its address. Tensors over it stay."""
        if block.nbytes and nbytes not in (0, block.nbytes):
            raise RuntimeError(f"late resizes a storage of {block.nbytes} bytes to 0, and not to {nbytes}")
        before, rounded = -(-block.nbytes // GRAIN) * GRAIN, self.check_room(max(nbytes - block.nbytes, 0))
        if rounded > block.room:
            raise RuntimeError(f"late has {block.room} bytes for a storage that is to have {nbytes}")
        if nbytes != block.nbytes:
            block.host, block.nbytes = torch.full((nbytes,), 0xFF, dtype=torch.uint8).untyped_storage(), nbytes
            self.live_bytes += rounded if nbytes else -before
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _slot(self) -> int:
        if self._empty_slots:
            return self._empty_slots.pop()
        if len(self._used) == _SLOTS:
            raise RuntimeError(f"late has {_SLOTS} allocations, and no room for another")
        self._used.append(None)
        return len(self._used) - 1

    def freed(self) -> list[Block]:
        """Return the blocks that torch has freed since the last call, and forget them."""
        gone = []
        for slot in numpy.flatnonzero(self._words[: len(self._used)]).tolist():
            block = self._used[slot]
            if block is not None:
                self._used[slot] = None
                self._words[slot] = 0
                self._empty_slots.append(slot)
                block.owners -= 1
                if block.is_shared:
                    self._forget_shared(block)
                    continue
                gone.append(block)
                del self.blocks[block.base]
                self.live_bytes -= -(-block.nbytes // GRAIN) * GRAIN
        return gone

    def _forget_shared(self, block: Block) -> None:
        if not block.owners and self.blocks.get(block.base) is block:
            del self.blocks[block.base]

    def take_addresses(self, nbytes: int) -> int:
        """Return the first of addresses that nothing else gets."""
        if self._next + nbytes > self._end:
            raise RuntimeError("late has used up its addresses: it never gives one out twice")
        self._next += nbytes
        return int(self._next - nbytes)

    def count(self, nbytes: int) -> None:
        """Count bytes that are mapped beside the allocations; negative ones are unmapped."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
MEMORY = Memory()


def is_late(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def block_of(tensor: Tensor) -> Block:
    try:
        return MEMORY.blocks[tensor.untyped_storage().data_ptr()]
    except KeyError:
        raise RuntimeError(f"a tensor of shape {tuple(tensor.shape)} on late has no memory") from None


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of its storage from its first to behind its last element."""
    if not tensor.numel():
        return (0, 0)
    last: Any = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start: Any = tensor.storage_offset() * tensor.element_size()
    return (start, start + (last + 1) * tensor.element_size())


def alias_of(tensor: Tensor) -> Tensor:
    """Return the CPU tensor over the bytes of a device tensor, conjugated or negated as that one is."""
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    if span_of(tensor)[1] > block_of(tensor).nbytes:
        raise RuntimeError(f"illegal access to memory of late that resize_ has freed, of shape {tuple(tensor.shape)}")
    alias = torch.empty(0, dtype=tensor.dtype).set_(block_of(tensor).host, *place)
    alias = alias.conj() if tensor.is_conj() else alias
    return torch._neg_view(alias) if tensor.is_neg() else alias


def like(owner: Tensor, shown: Tensor) -> Tensor:
    """Return the view of a device storage that has the sizes and strides of a CPU tensor."""
    place = shown.shape, shown.stride(), shown.storage_offset()
    if owner.shape == place[0] and owner.stride() == place[1] and owner.storage_offset() == place[2]:
        return owner
    return torch.ops.aten.as_strided.default.redispatch(private.CPU_KEYS, owner, *place)  # type: ignore[no-any-return]
