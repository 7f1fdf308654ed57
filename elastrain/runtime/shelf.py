"""Shard states by key: most in memory, those that have to make room on disk. Tensors and devices only; decides nothing.

A state on disk is read before it is used and written after it was changed, as a whole, checked on every read. What
was taken from here and changed must therefore be put back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from elastrain.errors import DriveFailedError
from elastrain.offload.buffers import lease
from elastrain.offload.device import Copy, Device
from elastrain.offload.errors import CorruptSpillError, OffloadError, SpillReadError, SpillWriteError
from elastrain.snapshot.state import ShardState

ALIGN_BYTES = 64
Key = TypeVar("Key", bound=Hashable)
Other = TypeVar("Other", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class _OnDisk:
    """`meta` describes the tensors, which lie one after the other at multiples of `ALIGN_BYTES`."""

    shard: int
    device: Device
    copy: Copy
    meta: bytes
    likes: tuple[tuple[torch.dtype, int], ...]
    """dtype and number of elements of each tensor; the first are the parameters."""
    is_bound: bool
    """The parameters are the model's own: they are not on disk."""


class Shelf(MutableMapping[Key, ShardState]):
    """`home(shard)` is the model's own memory of a shard's parameters. Used by one thread.

    Raises DriveFailedError where a device does not take a state or does not give it back as it was.
    """

    def __init__(self, home: Callable[[int], Tensor]) -> None:
        self.outside: frozenset[int] = frozenset()
        self._home = home
        self._devices: Sequence[Device] = ()
        self._states: dict[Key, ShardState | _OnDisk] = {}

    def use(self, devices: Sequence[Device], outside: frozenset[int]) -> None:
        """From now on the states of the shards `outside` lie on these devices, all others in memory."""
        self._devices, self.outside = devices, outside
        for key, entry in list(self._states.items()):
            if isinstance(entry, _OnDisk) != (entry.shard in outside):
                self[key] = self[key]

    def __getitem__(self, key: Key) -> ShardState:
        """The state itself if it is in memory, else what is on disk, read into memory of its own."""
        entry = self._states[key]
        return entry if isinstance(entry, ShardState) else self._read(entry)

    def __setitem__(self, key: Key, state: ShardState) -> None:
        entry = self._write(state) if state.shard in self.outside else state
        self._free(key)
        self._states[key] = entry

    def __delitem__(self, key: Key) -> None:
        self._free(key)
        del self._states[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, key: object) -> bool:
        return key in self._states

    def copy(self, key: Key) -> ShardState:
        """A state that shares no memory with anything here."""
        entry = self._states[key]
        if isinstance(entry, ShardState) or entry.is_bound:
            return self[key].clone()
        return self._read(entry)

    def adopt(self, key: Key, other: Shelf[Other], theirs: Other) -> None:
        """Move a state over from another shelf; nothing is read or written."""
        self._free(key)
        self._states[key] = other._states.pop(theirs)

    def size_bytes(self, key: Key) -> int:
        """All tensors of a state, wherever they are."""
        entry = self._states[key]
        if isinstance(entry, ShardState):
            return entry.nbytes
        return sum(dtype.itemsize * numel for dtype, numel in entry.likes)

    def memory_bytes(self) -> int:
        """What is kept in memory, the model's own parameters left out."""
        inside = [entry for entry in list(self._states.values()) if isinstance(entry, ShardState)]
        return sum(state.nbytes - (state.parameters.nbytes if self._is_bound(state) else 0) for state in inside)

    def disk_bytes(self) -> int:
        """What is kept on disk."""
        return sum(entry.copy.size_bytes for entry in list(self._states.values()) if isinstance(entry, _OnDisk))

    def moments(self) -> float | None:
        """Bytes of optimizer state per byte of parameters; None before anything was updated."""
        sizes = [(self.size_bytes(key), self._parameters_bytes(key)) for key in list(self._states)]
        parameters_bytes = sum(parameters for _, parameters in sizes)
        more_bytes = sum(size for size, _ in sizes) - parameters_bytes
        return more_bytes / parameters_bytes if more_bytes and parameters_bytes else None

    def _parameters_bytes(self, key: Key) -> int:
        entry = self._states[key]
        if isinstance(entry, ShardState):
            return entry.parameters.nbytes
        dtype, numel = entry.likes[0]
        return dtype.itemsize * numel

    def _is_bound(self, state: ShardState) -> bool:
        return state.parameters.data_ptr() == self._home(state.shard).data_ptr()

    def _free(self, key: Key) -> None:
        entry = self._states.get(key)
        if isinstance(entry, _OnDisk):
            entry.device.free(entry.copy.slot)

    def _write(self, state: ShardState) -> _OnDisk:
        meta, tensors = state.pack()
        is_bound = self._is_bound(state)
        written = tensors[1:] if is_bound else tensors
        likes = tuple((tensor.dtype, tensor.numel()) for tensor in tensors)
        memory = lease(size_bytes=max(1, _end_bytes(likes[is_bound:])), shift_bytes=0)
        for part, tensor in zip(_parts(memory.storage, likes[is_bound:]), written, strict=True):
            part.copy_(tensor)
        device = min(self._devices, key=lambda each: each.used_bytes)
        try:
            copy = device.write(memory.image[: memory.storage.nbytes()], 0, _never)
        except SpillWriteError as fault:
            raise _failed(device, state.shard, "take", fault) from fault
        return _OnDisk(shard=state.shard, device=device, copy=copy, meta=meta, likes=likes, is_bound=is_bound)

    def _read(self, entry: _OnDisk) -> ShardState:
        memory = lease(size_bytes=entry.copy.size_bytes, shift_bytes=entry.copy.shift_bytes)
        try:
            entry.device.read(entry.copy, memory.image, _never)
        except SpillReadError as fault:
            raise _failed(entry.device, entry.shard, "give back", fault) from fault
        tensors = _parts(memory.storage, entry.likes[entry.is_bound :])
        return ShardState.unpack(entry.meta, [self._home(entry.shard), *tensors] if entry.is_bound else tensors)


def _failed(device: Device, shard: int, what: str, fault: OffloadError) -> DriveFailedError:
    why = (
        "other bytes came back than were written" if isinstance(fault, CorruptSpillError) else fault.__cause__ or fault
    )
    return DriveFailedError(
        f"{device.engine.name} does not {what} the optimizer state of shard {shard} ({why}): this member ends, and the "
        "shard's other holders go on; look at that drive, or name another directory (--offload-dir)"
    )


def _never() -> bool:
    return False


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _end_bytes(likes: Sequence[tuple[torch.dtype, int]]) -> int:
    return sum(_round_up(dtype.itemsize * numel) for dtype, numel in likes)


def _parts(storage: torch.UntypedStorage, likes: Sequence[tuple[torch.dtype, int]]) -> list[Tensor]:
    """Tensors over the storage, one after the other."""
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    parts, start_bytes = [], 0
    for dtype, numel in likes:
        parts.append(whole[start_bytes : start_bytes + dtype.itemsize * numel].view(dtype))
        start_bytes += _round_up(dtype.itemsize * numel)
    return parts
