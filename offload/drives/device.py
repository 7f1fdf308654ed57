"""One device: its engine, the slots of its slab, its request queue, and measurements.

A slot holds the page image of one storage (see `host_buffers.py`). It is moved in pieces, each with a checksum. Errors
of the engine become the named errors of `errors.py` here.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import xxhash

from elastrain.offload.drives.compression import Codec, IdleCores
from elastrain.offload.drives.host_buffers import cut, page_image, tensor_checksum
from elastrain.offload.drives.port import OWN_COPIES, AddressableEngine, CudaEngine, IoEngine, round_up
from elastrain.offload.drives.request_queue import DeviceTime, Meter, RequestQueue, Slot, SlotAllocator
from elastrain.offload.errors import CorruptSpillError, SpillReadError, SpillWriteError
from elastrain.offload.planning.profile import DeviceStats

PIECE_BYTES = 8 << 20
SLAB_GROWTH_BYTES = 256 << 20
UNBOUNDED_BYTES = 1 << 62
HOLES_SHARE = 1 / 8
ALIGN_BYTES = 64
# Full file system, the user's disk quota, or the limit on file sizes.
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class EndedEarlyError(Exception):
    """Signal that the request was cancelled between two pieces. Never leaves this package."""


class NoSpaceError(SpillWriteError):
    """A used-up quota or a full device."""


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A storage on a device: its slot, how its bytes lie in the page image, and the checksum of each piece."""

    slot: Slot
    size_bytes: int
    shift_bytes: int
    checksums: tuple[int, ...]
    packed_bytes: tuple[int, ...] = ()
    """Packed size of each piece; 0 for a piece that is not packed."""


@dataclass(frozen=True, kw_only=True)
class CopiedInPlace:
    """Checksum of the copied bytes, and the seconds of the copy alone (without waiting for a turn, or the checksum)."""

    checksum: int
    seconds: float


Move = tuple[int, Callable[[int], int]]
"""Number of bytes, and a function that moves them to or from an offset of the engine and returns their checksum."""


def _sum_of_views(piece: list[memoryview]) -> int:
    digest = xxhash.xxh3_64()
    for view in piece:
        digest.update(view)
    return int(digest.intdigest())


def _moves(views: list[memoryview], move: Callable[[list[memoryview], int], int]) -> list[Move]:
    return [(sum(view.nbytes for view in piece), partial(move, piece)) for piece in cut(views, PIECE_BYTES)]


def _parts(parts: Sequence[torch.Tensor], move: Callable[[torch.Tensor, int], int]) -> list[Move]:
    """Return the moves of tensors that lie one after the other. Each begins at a multiple of `ALIGN_BYTES`."""
    last = len(parts) - 1
    sizes = [
        part.nbytes if at == last else -(-part.nbytes // ALIGN_BYTES) * ALIGN_BYTES for at, part in enumerate(parts)
    ]
    return [(size_bytes, partial(move, part)) for size_bytes, part in zip(sizes, parts, strict=True)]


class Device:
    """One engine with its slots and queue, which stores copies of storages.

    `write` and `read` block. The threads of the queue call them.
    """

    def __init__(
        self,
        engine: IoEngine,
        *,
        quota_bytes: int | None = None,
        threads: int = 2,
        checked: bool = True,
        clock: Callable[[], float] = time.monotonic,
        idle_cores: Callable[[], float] | None = None,
    ) -> None:
        self.engine = engine
        self._codec = Codec(engine, idle_cores=idle_cores or IdleCores().look)
        # Memory can be copied in both directions at once, each at full speed.
        both_ways = isinstance(engine, AddressableEngine)
        self.queue = RequestQueue(engine.name, threads=threads, writers=threads // 2 if both_ways else 0)
        drive = DeviceTime(clock)
        self.writes = Meter(drive)
        self.reads = Meter(DeviceTime(clock) if both_ways else drive)
        self._moved_by = ""
        self.queued_bytes = 0  # updated by the callers that queue writes
        self._checked = checked
        self._quota_bytes = quota_bytes
        self._slots = SlotAllocator(UNBOUNDED_BYTES if quota_bytes is None else quota_bytes)
        self._lock = threading.Lock()
        self._reserved_bytes = 0

    def write(
        self,
        payload: memoryview,
        shift_bytes: int,
        cancelled: Callable[[], bool],
        *,
        kind: str | None = None,
        is_copied: bool = False,
    ) -> Copy:
        """Write `payload` into a slot, packed if that pays for storages of this `kind` (None: never packed).

        `is_copied` is True if the payload is a copy of an accelerator's memory. Raises `SpillWriteError` or
        `EndedEarlyError`; the slot is then free again.
        """
        self._moved_by = OWN_COPIES if is_copied else self._moved_by
        packed: list[int] = []

        def put(piece: list[memoryview], offset_bytes: int) -> int:
            checksum = _sum_of_views(piece)  # needed even if reads are not checked: `has` compares it
            packed.append(self._codec.write(offset_bytes, piece, kind))
            return checksum

        copy = self._put(_moves(page_image(payload, shift_bytes), put), cancelled)
        return replace(copy, size_bytes=payload.nbytes, shift_bytes=shift_bytes, packed_bytes=tuple(packed))

    def read(self, copy: Copy, image: memoryview, cancelled: Callable[[], bool]) -> None:
        """Fill the page image. Raises `SpillReadError`, `CorruptSpillError` or `EndedEarlyError`."""
        packed = iter(copy.packed_bytes)

        def get(piece: list[memoryview], offset_bytes: int) -> int:
            self._codec.read(offset_bytes, piece, next(packed))
            return _sum_of_views(piece) if self._checked else 0

        self._get(copy, _moves([image], get), cancelled)

    def has(self, copy: Copy, payload: memoryview) -> bool:
        """Return True if the copy has the bytes of `payload`. Compares checksums, without reading the device."""
        pieces = cut(page_image(payload, copy.shift_bytes), PIECE_BYTES)
        return copy.checksums == tuple(map(_sum_of_views, pieces))

    def has_cuda(self, copy: Copy, memory: torch.Tensor) -> bool:
        """Return True if a copy written by `write_cuda` or `write_in_place` has the bytes of `memory`."""
        return copy.checksums == (tensor_checksum(memory),)

    def write_cuda(self, engine: CudaEngine, parts: Sequence[torch.Tensor], cancelled: Callable[[], bool]) -> Copy:
        """Write CUDA tensors of bytes one after the other, without the host. Raises what `write` raises."""
        self._moved_by = engine.moved_by

        def put(part: torch.Tensor, offset_bytes: int) -> int:
            if part.nbytes:
                engine.write_cuda(offset_bytes, part)
            return tensor_checksum(part)

        return self._put(_parts(parts, put), cancelled)

    def read_cuda(
        self, engine: CudaEngine, copy: Copy, parts: Sequence[torch.Tensor], cancelled: Callable[[], bool]
    ) -> None:
        """Fill tensors of the sizes that `write_cuda` was given. Raises what `read` raises."""

        def get(part: torch.Tensor, offset_bytes: int) -> int:
            if part.nbytes:
                engine.read_cuda(offset_bytes, part)
            return tensor_checksum(part)

        self._get(copy, _parts(parts, get), cancelled)

    def write_in_place(
        self,
        engine: AddressableEngine,
        size_bytes: int,
        fill: Callable[[memoryview], CopiedInPlace],
        cancelled: Callable[[], bool],
    ) -> Copy:
        """Let `fill` copy a storage into the engine's own memory. Raises what `write` raises."""
        self._moved_by = OWN_COPIES

        def put(offset_bytes: int) -> int:
            lone, copied = self.writes.lone, fill(engine.view(offset_bytes, size_bytes))
            self.writes.tell(lone, size_bytes, copied.seconds)
            return copied.checksum

        return self._put([(size_bytes, put)], cancelled)

    def read_in_place(
        self,
        engine: AddressableEngine,
        copy: Copy,
        take: Callable[[memoryview], CopiedInPlace],
        cancelled: Callable[[], bool],
    ) -> None:
        """Let `take` copy a storage out of the engine's own memory. Raises what `read` raises."""

        def get(offset_bytes: int) -> int:
            lone, copied = self.reads.lone, take(engine.view(offset_bytes, copy.size_bytes))
            self.reads.tell(lone, copy.size_bytes, copied.seconds)
            return copied.checksum

        self._get(copy, [(copy.size_bytes, get)], cancelled)

    def _put(self, moves: list[Move], cancelled: Callable[[], bool]) -> Copy:
        all_bytes = sum(size_bytes for size_bytes, _ in moves)
        slot = self._allocate(all_bytes)
        moved_bytes, sums = 0, []
        self.writes.start()
        try:
            for size_bytes, move in moves:
                if cancelled():
                    raise EndedEarlyError
                sums.append(move(slot.offset_bytes + moved_bytes))
                moved_bytes += size_bytes
        except OSError as fault:
            self.free(slot)
            raise _write_error(self.engine.name, fault) from fault
        except BaseException:
            self.free(slot)
            raise
        finally:
            self.writes.stop(moved_bytes)
        return Copy(slot=slot, size_bytes=all_bytes, shift_bytes=0, checksums=tuple(sums))

    def _get(self, copy: Copy, moves: list[Move], cancelled: Callable[[], bool]) -> None:
        moved_bytes = 0
        self.reads.start()
        try:
            for (size_bytes, move), expected in zip(moves, copy.checksums, strict=True):
                if cancelled():
                    raise EndedEarlyError
                offset_bytes = copy.slot.offset_bytes + moved_bytes
                found = move(offset_bytes)
                moved_bytes += size_bytes
                if self._checked and found != expected:
                    raise _other_bytes(self.engine.name, offset_bytes)
        except OSError as fault:
            raise SpillReadError(
                f"{self.engine.name} does not give activations back ({fault}): compute the micro-batch again"
            ) from fault
        finally:
            self.reads.stop(moved_bytes)

    def free(self, slot: Slot) -> None:
        """Free the slot for other storages."""
        with self._lock:
            self._slots.free(slot)

    def rate_bytes_per_s(self) -> float:
        """Return the slower of the recent write and read rates. Everything that is written is read again."""
        return min(self.writes.recent_bytes_per_s, self.reads.recent_bytes_per_s)

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots in use."""
        return self._slots.used_bytes

    @property
    def quota_bytes(self) -> int | None:
        """Bound of all slots together, in bytes; None for no bound."""
        return self._quota_bytes

    def has_room(self, size_bytes: int) -> bool:
        """Return True if this storage fits beside the queued ones.

        `HOLES_SHARE` of a quota is left for holes between slots.
        """
        if self._quota_bytes is None:
            return True
        return self.used_bytes + self.queued_bytes + size_bytes <= self._quota_bytes * (1 - HOLES_SHARE)

    def stats(self) -> DeviceStats:
        """Return totals and recent rates."""
        return DeviceStats(
            name=self.engine.name,
            slab_bytes=self._reserved_bytes,
            used_bytes=self.used_bytes,
            quota_bytes=self._quota_bytes,
            written_bytes=self._codec.written_bytes or self.writes.moved_bytes,
            read_bytes=self._codec.read_bytes or self.reads.moved_bytes,
            write_bytes_per_s=self.writes.recent_bytes_per_s,
            read_bytes_per_s=self.reads.recent_bytes_per_s,
            capacity_bytes=self.engine.capacity_bytes(),
            moved_by=self._moved_by,
            packing=tuple(f"{kind}: {reason}" for kind, reason in sorted(self._codec.reasons.items())),
        )

    def close(self) -> None:
        """End the queue's threads, then close the engine."""
        self.queue.close()
        self.engine.close()

    def _allocate(self, size_bytes: int) -> Slot:
        with self._lock:
            slot = self._slots.allocate(size_bytes)
            if slot is None:
                raise NoSpaceError(
                    f"the quota of {self._slots.quota_bytes} bytes on {self.engine.name} is used up: raise it"
                )
            try:
                self._reserve(slot.offset_bytes + slot.size_bytes)
            except OSError as fault:
                self._slots.free(slot)
                raise _write_error(self.engine.name, fault) from fault
            return slot

    def _reserve(self, end_bytes: int) -> None:
        """Grow the slab in large steps, or to just `end_bytes` if the device has no room for more."""
        if end_bytes <= self._reserved_bytes:
            return
        generous_bytes = min(round_up(end_bytes + SLAB_GROWTH_BYTES), max(self._slots.quota_bytes, end_bytes))
        for size_bytes in (generous_bytes, end_bytes):
            try:
                self.engine.reserve(size_bytes)
            except OSError as fault:
                if fault.errno not in NO_SPACE or size_bytes == end_bytes:
                    raise
            else:
                self._reserved_bytes = size_bytes
                return


def _other_bytes(name: str, offset_bytes: int) -> CorruptSpillError:
    return CorruptSpillError(
        f"{name} gave back other bytes than were written (offset {offset_bytes}): compute the micro-batch again and "
        f"look at the drive"
    )


def _write_error(name: str, fault: OSError) -> SpillWriteError:
    if fault.errno in NO_SPACE:
        return NoSpaceError(f"{name} is full ({fault}): free space there, or name another directory")
    return SpillWriteError(f"{name} does not take activations ({fault}): name another directory")
