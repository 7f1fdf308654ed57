"""A member's slot ring: a piece of its shared memory that shows the other members what it offers at each step.

All members of a group count the same steps (*sequence numbers*). Step `number` uses slot `number % SLOTS`.

    published   a futex word: number of steps of this generation that the owner has published
    finished    a futex word: number of these steps for which the owner needs nothing more from the others
    generation  the generation in which the ring is used; 0 while the ring is free
    failed      not 0 once the owner has failed: tensors that it has lent may change from then on. A reader checks this
                after it has read a lent tensor. When an operation succeeds, all members have read what was lent in it
    slots       per step: the place of the offered tensor, the elements for each rank, and the operation's description
    inline      one area per slot, for tensors small enough to lie in the ring itself

Only the owner writes. It writes a slot first and counts it afterwards. For a new generation it sets `generation` to 0,
resets the counts, and then writes the new number. A reader that finds the same generation before and after it reads a
count has read the right count. On x86-64 other processors see these writes in order, so rings are used only there.

A member has two rings, a *double buffer*. So a slow member still finds in the former ring what it needs, however many
views follow:

    a generation begins     in the ring of the generation before if nothing was published there, else in the free ring.
                            At that time the owner reads nothing of former generations
    all others are in it    none of them needs the former ring, so it becomes free. A removed member may still read
                            there; it notices in the end that the generation has changed. Until then the owner publishes
                            only that it has reached a barrier, which no member completes without all others

Nothing here waits, and nothing knows members.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from elastrain.comm.collectives.algorithms import Transfer
from elastrain.comm.errors import ProtocolError
from elastrain.comm.wire.frames import DTYPES, tensor_bytes

SLOTS = 4  # a member may be this many steps ahead of the members that read its slots
INLINE_BYTES = 64 << 10
MEMBERS_MAX = 512
DESCRIPTION_MAX_BYTES = 400
COUNT_MASK = 0xFFFFFFFF
_HALF = 1 << 31

_PUBLISHED_BYTES, _FINISHED_BYTES = 0, 64  # offsets: each on a cache line of its own
_BEGUN_BYTES = 68
_GENERATION, _FAILED = 1, 2  # indices of 64-bit words, behind `published`
_SLOTS_AT_BYTES = 128
_SLOT_BYTES = 16 << 10
_HEADER = struct.Struct("<QQIHHBBxxQQ")  # offset, size, segment, length of description, slices, dtype, lent, only slice
_SLICE = struct.Struct("<QQ")
_SLICES_AT_BYTES = _HEADER.size + DESCRIPTION_MAX_BYTES
_INLINE_AT_BYTES = _SLOTS_AT_BYTES + SLOTS * _SLOT_BYTES
_RING_BYTES = _INLINE_AT_BYTES + SLOTS * INLINE_BYTES
DOUBLE_BUFFER_BYTES = 2 * _RING_BYTES

# Counts of generation g begin at g times this, so a count of another generation is far off.
_APART = 0x9E3779B1
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
assert _SLICES_AT_BYTES + MEMBERS_MAX * _SLICE.size <= _SLOT_BYTES


def reached(count: int, wanted: int) -> bool:
    """Return True if a 32-bit counter, which may have wrapped around, is at `wanted` or past it."""
    return (count - wanted) & COUNT_MASK < _HALF


class Location(NamedTuple):  # made at every step, where a frozen dataclass takes four times as long
    """Place of an offered tensor: in a segment, or (segment 0) in the inline area of this step."""

    segment: int
    offset_bytes: int


_NOWHERE = Location(segment=0, offset_bytes=0)


class Entry(NamedTuple):
    """Offer of one member to another at a step: `size_bytes` at `location`, as elements of `dtype`.

    `lent`: the tensor belongs to the caller of the operation and may change after a failure.
    """

    lent: bool
    description: bytes
    location: Location
    size_bytes: int
    dtype: torch.dtype


class SlotRing:
    """One ring: this member's own, or a peer's, which is read-only. `tensor` has `_RING_BYTES` elements of uint8."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._bytes = tensor_bytes(tensor)
        self._counts = self._bytes[:_SLOTS_AT_BYTES].cast("I")
        self._longs = self._bytes[:_SLOTS_AT_BYTES].cast("Q")
        self.published_address = tensor.data_ptr() + _PUBLISHED_BYTES
        self.finished_address = tensor.data_ptr() + _FINISHED_BYTES
        self._first = 0  # in the own ring: initial value of the counts in this generation

    @property
    def generation(self) -> int:
        """The generation in which the ring is used; 0 while it is free."""
        return self._longs[_GENERATION]

    def published(self, generation: int) -> int:
        """Return the number of steps published in this generation; 0 if the ring is not used in it."""
        return self._count(_PUBLISHED_BYTES // 4, generation)

    def finished(self, generation: int) -> int:
        """Return the number of steps of this generation for which the owner needs nothing more from the others."""
        return self._count(_FINISHED_BYTES // 4, generation)

    def has_published(self, generation: int, steps: int) -> bool | None:
        """Return True once `steps` steps are published, else None, as `RingWaits.wait` expects."""
        return (self._count(_PUBLISHED_BYTES // 4, generation) - steps) & COUNT_MASK < _HALF or None

    def has_finished(self, generation: int, steps: int) -> bool | None:
        """Return True once `steps` steps are finished, else None, as `RingWaits.wait` expects."""
        return (self._count(_FINISHED_BYTES // 4, generation) - steps) & COUNT_MASK < _HALF or None

    def _count(self, place: int, generation: int) -> int:
        longs = self._longs
        if longs[_GENERATION] != generation:
            return 0
        count = (self._counts[place] - generation * _APART) & COUNT_MASK
        return count if longs[_GENERATION] == generation else 0

    def has_failed(self, generation: int) -> bool:
        """Return True if tensors lent in this generation may have changed: the owner failed, or left the generation."""
        failed = self._longs[_FAILED] != 0
        return failed or self._longs[_GENERATION] != generation

    # Called by the owner only

    def clear(self) -> None:
        """Reset memory of unknown content to a free ring."""
        self._bytes[:_SLOTS_AT_BYTES] = bytes(_SLOTS_AT_BYTES)

    def begin(self, generation: int) -> None:
        """Use the ring for this generation, with all counts at 0."""
        self.free()
        self._longs[_FAILED] = 0
        self._first = generation * _APART & COUNT_MASK
        self._counts[_PUBLISHED_BYTES // 4] = self._counts[_FINISHED_BYTES // 4] = self._first
        self._longs[_GENERATION] = generation

    def free(self) -> None:
        """Mark the ring as free."""
        self._longs[_GENERATION] = 0

    def fail(self) -> None:
        """Publish that the owner has failed."""
        self._longs[_FAILED] = 1

    def count_published(self, sequence: int) -> None:
        """Publish that the step `sequence` can be read. Wakes no waiters."""
        self._counts[_PUBLISHED_BYTES // 4] = (self._first + sequence + 1) & COUNT_MASK

    def count_finished(self, sequence: int) -> None:
        """Publish that the owner needs nothing more for steps up to `sequence`. Wakes no waiters."""
        self._counts[_FINISHED_BYTES // 4] = (self._first + sequence + 1) & COUNT_MASK

    def inline_area(self, sequence: int) -> torch.Tensor:
        """Return the `INLINE_BYTES` bytes of this step's inline area."""
        start = _INLINE_AT_BYTES + sequence % SLOTS * INLINE_BYTES
        return self.tensor[start : start + INLINE_BYTES]

    def write(
        self,
        sequence: int,
        *,
        description: bytes,
        offered: torch.Tensor | None,
        location: Location,
        sends: Sequence[Transfer],
        lent: bool,
    ) -> None:
        """Fill the slot of a step: each transfer in `sends` offers one slice of `offered` to one rank.

        Args:
            sequence: The step.
            description: Description of the operation; peers compare it with their own.
            offered: Flat tensor that lies at `location`, or None if all slices are empty.
            location: Place of the tensor.
            sends: Transfers of the round.
            lent: The tensor belongs to the caller of the operation.
        """
        at = _SLOTS_AT_BYTES + sequence % SLOTS * _SLOT_BYTES
        start, stop = (sends[0].start, sends[0].stop) if sends else (0, 0)
        slices = 0
        for send in sends:
            if send.start != start or send.stop != stop:
                start, stop, slices = 0, 0, 1 + max(send.to for send in sends)
                break
        code, size_bytes = (0, 0) if offered is None else (_CODES[offered.dtype], offered.nbytes)
        where = (location.offset_bytes, size_bytes, location.segment)
        _HEADER.pack_into(self._bytes, at, *where, len(description), slices, code, lent, start, stop)
        self._bytes[at + _HEADER.size : at + _HEADER.size + len(description)] = description
        if slices:
            for send in sends:
                _SLICE.pack_into(self._bytes, at + _SLICES_AT_BYTES + send.to * _SLICE.size, send.start, send.stop)

    def read(self, sequence: int, rank: int) -> Entry:
        """Return the offer of the owner to `rank` at a step. Raises ProtocolError for invalid content."""
        at = _SLOTS_AT_BYTES + sequence % SLOTS * _SLOT_BYTES
        offset, size, segment, length, slices, code, lent, start, stop = _HEADER.unpack_from(self._bytes, at)
        if slices and rank < slices:
            start, stop = _SLICE.unpack_from(self._bytes, at + _SLICES_AT_BYTES + rank * _SLICE.size)
        if length > DESCRIPTION_MAX_BYTES or slices > MEMBERS_MAX or code >= len(DTYPES):
            raise ProtocolError(f"an entry with {length} bytes of description, {slices} slices and dtype code {code}")
        dtype = DTYPES[code]
        if not start <= stop <= size // dtype.itemsize or (offset % dtype.itemsize):
            raise ProtocolError(f"elements {start} to {stop} of {size} bytes of {dtype} at {offset}")
        said = bytes(self._bytes[at + _HEADER.size : at + _HEADER.size + length])
        size_bytes = (stop - start) * dtype.itemsize
        location = Location(segment=segment, offset_bytes=offset + start * dtype.itemsize) if size_bytes else _NOWHERE
        return Entry(lent=bool(lent), description=said, location=location, size_bytes=size_bytes, dtype=dtype)


class DoubleBuffer:
    """The two rings of a member in one group, in `DOUBLE_BUFFER_BYTES` elements of uint8.

    The futex word at `begun_address` counts the generations that the owner has begun.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._rings = (SlotRing(tensor[:_RING_BYTES]), SlotRing(tensor[_RING_BYTES:]))
        self._longs = (self._rings[0]._longs, self._rings[1]._longs)
        self._begun = tensor_bytes(tensor)[_BEGUN_BYTES : _BEGUN_BYTES + 4].cast("I")
        self.begun_address = tensor.data_ptr() + _BEGUN_BYTES

    def find(self, generation: int) -> SlotRing | None:
        """Return the ring used in this generation, or None: the owner has not begun it, or has freed its ring."""
        one, other = self._longs
        if one[_GENERATION] == generation:
            return self._rings[0]
        return self._rings[1] if other[_GENERATION] == generation else None

    def of_or_any(self, generation: int) -> SlotRing:
        """Return the ring of this generation or, if that was reused, either ring: both read as empty for it."""
        return self._rings[self._longs[1][_GENERATION] == generation]

    @property
    def newest(self) -> int:
        """The newest generation that the owner has begun; 0 before the first."""
        one, other = self._longs
        return max(one[_GENERATION], other[_GENERATION])

    # Called by the owner only

    def clear(self) -> None:
        """Reset memory of unknown content to two free rings."""
        for ring in self._rings:
            ring.clear()

    def begin(self, generation: int) -> SlotRing:
        """Choose a ring for this generation, as the module describes. The owner must read nothing of former ones."""
        former, current = self._by_age()
        # If the former ring is not free, no member needs what was published since (see GroupGeneration.open).
        ring = former if current.published(current.generation) and not former.generation else current
        ring.begin(generation)
        self._begun[0] = (self._begun[0] + 1) & COUNT_MASK
        return ring

    @property
    def former(self) -> SlotRing | None:
        """The ring of an earlier generation, in which other members may still read; None if there is none."""
        ring, _ = self._by_age()
        return ring if ring.generation else None

    def _by_age(self) -> tuple[SlotRing, SlotRing]:
        one, other = self._rings
        return (one, other) if self._longs[0][_GENERATION] <= self._longs[1][_GENERATION] else (other, one)

    def free_former(self) -> None:
        """Free the former ring, once all members that could read it are in the newest generation."""
        self._by_age()[0].free()
