"""The shard states of one member, by key. Chosen shards lie on disk, to save memory.

A state on disk is read whole before it is used. A caller that changes a state must put it back, so that the change
reaches the disk. This module does not decide which shards lie on disk. In a job on a device, memory means the device's,
and host memory is one more disk, where the states of a member's backups lie.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from elastrain.snapshot.shard_state import ShardState
from elastrain.snapshot.states_on_host import HostState, StatesOnHost

Key = TypeVar("Key", bound=Hashable)
Other = TypeVar("Other", bound=Hashable)


class Stored(Protocol):
    """A handle of one state on disk."""

    @property
    def size_bytes(self) -> int:
        """Bytes that the state uses on disk."""
        ...


class Disk(Protocol):
    """A store for states that leave memory. If a device fails, its methods raise errors of the implementation."""

    def write(self, shard: int, tensors: Sequence[Tensor]) -> Stored:
        """Write the tensors of a state one after the other. Returns a handle for `read` and `free`."""

    def read(self, shard: int, stored: Stored) -> list[Tensor]:
        """Return the tensors as they were written, in new memory, after a check."""

    def free(self, stored: Stored) -> None:
        """Release the space of a stored state."""


@dataclass(frozen=True, kw_only=True)
class _OnDisk:
    """A state on disk, with all that is needed to read it. `meta` is the description that `ShardState.pack` made."""

    shard: int
    disk: Disk
    stored: Stored
    meta: bytes
    likes: tuple[tuple[torch.dtype, int], ...]
    """Dtype and number of elements of each tensor. The first entry describes the parameters."""
    is_bound: bool
    """True if the parameters lie in the model's own memory, and are therefore not on disk."""


@dataclass(frozen=True)
class _OffDevice:
    """The shards whose states do not lie on the device: those that a member does not own, and chosen ones."""

    owned: Collection[int]
    """Shards whose primary is this member. They may change."""
    chosen: frozenset[int] = frozenset()

    def __contains__(self, shard: object) -> bool:
        return shard not in self.owned or shard in self.chosen


class _Places:
    """The places of states outside of memory."""

    def __init__(self) -> None:
        self.disk: Disk | None = None
        self.host: StatesOnHost | None = None
        """Host memory for backups, in a job on a device."""
        self.backups: tuple[Disk | None, frozenset[int]] = (None, frozenset())
        """The disk that takes backups from host memory, and their shards."""

    def disk_of(self, shard: int, bound: Collection[int]) -> Disk | None:
        """Return the disk for the state of a shard that is outside."""
        if self.host is None or shard in bound:
            return self.disk
        disk, shards = self.backups
        return disk if shard in shards else self.host

    def is_on(self, entry: _OnDisk, disk: Disk) -> bool:
        """Return True if a state is on this disk, or on one before it over the same drives."""
        return (entry.disk is self.host) == (disk is self.host)


class SnapshotStore(MutableMapping[Key, ShardState]):
    """The states of a member by key. One thread uses it.

    `home(shard)` returns the model's own memory for the parameters of a shard. Methods raise what the `Disk` raises.
    """

    def __init__(self, home: Callable[[int], Tensor]) -> None:
        self.bound: set[int] = set()
        """Shards whose primary is this member. The caller adds and removes them before it stores their states."""
        self.outside: Container[int] = frozenset()
        """Shards whose states lie on disk."""
        self._home = home
        self._places = _Places()
        self._states: dict[Key, ShardState | _OnDisk] = {}

    def use(self, disk: Disk, outside: frozenset[int], *, backups: bool = False) -> None:
        """Keep the states of the shards `outside` on this disk, and all others in memory.

        In a job on a device, this is for the shards that the member is the primary of, or else for its `backups`, of
        which the others stay in host memory.
        """
        if backups:
            self._places.backups = disk, outside
        else:
            self._places.disk = disk
            self.outside = outside if self._places.host is None else _OffDevice(self.bound, outside)
        self._move()

    def keep_backups_in(self, memory: StatesOnHost) -> None:
        """Keep the states of all shards that are not `bound` in host memory. Call it before any state is stored."""
        self._places.host = memory
        self.outside = _OffDevice(self.bound)

    def _move(self) -> None:
        for key, entry in list(self._states.items()):
            disk = self._disk_of(entry.shard)
            is_there = disk is not None and isinstance(entry, _OnDisk) and self._places.is_on(entry, disk)
            if not is_there and not (disk is None and isinstance(entry, ShardState)):
                self[key] = self[key]

    def _disk_of(self, shard: int) -> Disk | None:
        """Return the disk on which a shard's state is to lie, or None for memory."""
        return self._places.disk_of(shard, self.bound) if shard in self.outside else None

    def __getitem__(self, key: Key) -> ShardState:
        """Return the state itself if it is in memory. Else read it from disk into new memory."""
        entry = self._states[key]
        return entry if isinstance(entry, ShardState) else self._read(entry)

    def __setitem__(self, key: Key, state: ShardState) -> None:
        disk = self._disk_of(state.shard)
        entry = state if disk is None else self._write(state, disk)
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
        """Return a copy of the state that shares no memory with this store or with the model."""
        entry = self._states[key]
        if isinstance(entry, ShardState) or entry.is_bound:
            return self[key].clone()
        return self._read(entry)

    def copy_to_host(self, key: Key) -> ShardState:
        """Return a copy of the state in host memory. It shares no memory with any tensor that changes."""
        entry = self._states[key]
        if self._places.host is None:
            return self.copy(key)
        if isinstance(entry, _OnDisk) and isinstance(entry.stored, HostState):
            return ShardState.unpack(entry.meta, entry.stored.tensors)
        meta, tensors = self[key].pack()
        return ShardState.unpack(meta, self._places.host.write(entry.shard, tensors).tensors)

    def take_out(self, key: Key) -> ShardState:
        """Remove a state, and return it in host memory."""
        if self._places.host is None:
            return self.pop(key)
        state = self.copy_to_host(key)
        del self[key]
        return state

    def adopt(self, key: Key, other: SnapshotStore[Other], theirs: Other) -> None:
        """Move a state from another store into this one, without reading or writing it."""
        self._free(key)
        self._states[key] = other._states.pop(theirs)

    def size_bytes(self, key: Key) -> int:
        """Return the bytes of all tensors of a state, in memory or on disk."""
        entry = self._states[key]
        if isinstance(entry, ShardState):
            return entry.nbytes
        return sum(dtype.itemsize * numel for dtype, numel in entry.likes)

    def memory_bytes(self) -> int:
        """Return the bytes of all states in memory, without parameters that lie in the model's own memory."""
        inside = [entry for entry in list(self._states.values()) if isinstance(entry, ShardState)]
        return sum(state.nbytes - (state.parameters.nbytes if self._is_bound(state) else 0) for state in inside)

    def host_bytes(self) -> int:
        """Return the bytes of all states that lie in host memory, in a job on a device."""
        return sum(each.stored.size_bytes for each in _stored(self._states) if each.disk is self._places.host)

    def disk_bytes(self) -> int:
        """Return the bytes of all states on disk."""
        return sum(each.stored.size_bytes for each in _stored(self._states) if each.disk is not self._places.host)

    def moments(self) -> float | None:
        """Return the bytes of optimizer state per byte of parameters, or None before the first update."""
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
            entry.disk.free(entry.stored)

    def _write(self, state: ShardState, disk: Disk) -> _OnDisk:
        meta, tensors = state.pack()
        is_bound = self._is_bound(state)
        likes = tuple((tensor.dtype, tensor.numel()) for tensor in tensors)
        stored = disk.write(state.shard, tensors[1:] if is_bound else tensors)
        return _OnDisk(shard=state.shard, disk=disk, stored=stored, meta=meta, likes=likes, is_bound=is_bound)

    def _read(self, entry: _OnDisk) -> ShardState:
        tensors = entry.disk.read(entry.shard, entry.stored)
        return ShardState.unpack(entry.meta, [self._home(entry.shard), *tensors] if entry.is_bound else tensors)


def _stored(states: Mapping[Key, ShardState | _OnDisk]) -> list[_OnDisk]:
    return [entry for entry in list(states.values()) if isinstance(entry, _OnDisk)]
