"""A member's slot ring: a piece of its shared memory where it shows the others which part it offers at which step.

Steps are counted alike by all members of a group (their *sequence numbers*); slot `number % SLOTS` belongs to a step.

    published   a futex word: how many steps of this generation its owner has published
    finished    a futex word: after how many of them its owner needs nothing from others any more
    generation  that the ring is used in; 0 while it is free
    failed      not 0 once its owner has failed: from then on the tensors that it has lent may change. A member that has
                read one looks here afterwards; when an operation ends well, all have read what was lent in it
    slots       where the part lies, for whom which elements, and what the operation is
    inline      one area per slot, for parts so small that they lie in the ring itself

Only the owner writes. It writes a slot first and counts it afterwards; it takes the generation away before it sets the
counts back, and names the new one afterwards: a reader that finds the same generation before and after a count has the
right one. x86-64 shows other processors all this in order, which is why rings are used there only.

There are two rings, a *double buffer*, so that a slow member still finds in the former one what it needs, whatever
views follow:

    a generation begins     in the ring of the one before if nothing was published there, else in the free one. Its
                            owner reads nothing of former generations by then
    all others are in it    none of them needs the former ring: it becomes free. A removed member may still read there:
                            it sees in the end that the generation is gone. Before that, nothing is published but that
                            the owner has come to a barrier, which nobody completes without all

Nothing here waits or knows of members.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from elastrain.comm.collectives.algorithms import Transfer
from elastrain.comm.errors import ProtocolError
from elastrain.comm.wire.frames import DTYPES, tensor_bytes

SLOTS = 4  # a member may be this many steps ahead of those that need its parts
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

# Counts of a generation begin at this times its number: a count of another one is far off, whatever was published.
_APART = 0x9E3779B1
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
assert _SLICES_AT_BYTES + MEMBERS_MAX * _SLICE.size <= _SLOT_BYTES


def reached(count: int, wanted: int) -> bool:
    """Whether a counter of 32 bits, which may have begun anew, is at `wanted` or past it."""
    return (count - wanted) & COUNT_MASK < _HALF


class Location(NamedTuple):  # as Entry: made at every step, where a frozen dataclass takes four times as long
    """The place of an offered tensor: bytes of a segment, or (segment 0) of the inline area of this step."""

    segment: int
    offset_bytes: int


_NOWHERE = Location(segment=0, offset_bytes=0)


class Entry(NamedTuple):
    """The offer of one member to one other at a step: `size_bytes` at `location`, as elements of `dtype`.

    `lent`: a tensor of its caller's, which may change after a failure.
    """

    lent: bool
    description: bytes
    location: Location
    size_bytes: int
    dtype: torch.dtype


class SlotRing:
    """One ring: mine, or a peer's, which can only be read. `tensor`: `_RING_BYTES` of uint8."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._bytes = tensor_bytes(tensor)
        self._counts = self._bytes[:_SLOTS_AT_BYTES].cast("I")
        self._longs = self._bytes[:_SLOTS_AT_BYTES].cast("Q")
        self.published_address = tensor.data_ptr() + _PUBLISHED_BYTES
        self.finished_address = tensor.data_ptr() + _FINISHED_BYTES
        self._first = 0  # of mine: where the counts of its generation begin

    @property
    def generation(self) -> int:
        return self._longs[_GENERATION]

    def published(self, generation: int) -> int:
        """How many steps of this generation its owner has published; 0 before and after it."""
        return self._count(_PUBLISHED_BYTES // 4, generation)

    def finished(self, generation: int) -> int:
        """How many steps of this generation its owner has finished: it needs nothing more from others for them."""
        return self._count(_FINISHED_BYTES // 4, generation)

    def has_published(self, generation: int, steps: int) -> bool | None:
        """True once `steps` steps are published, else None, so that it serves as a wait predicate."""
        return (self._count(_PUBLISHED_BYTES // 4, generation) - steps) & COUNT_MASK < _HALF or None

    def has_finished(self, generation: int, steps: int) -> bool | None:
        """True once `steps` steps are finished, else None, so that it serves as a wait predicate."""
        return (self._count(_FINISHED_BYTES // 4, generation) - steps) & COUNT_MASK < _HALF or None

    def _count(self, place: int, generation: int) -> int:
        longs = self._longs
        if longs[_GENERATION] != generation:
            return 0
        count = (self._counts[place] - generation * _APART) & COUNT_MASK
        return count if longs[_GENERATION] == generation else 0

    def has_failed(self, generation: int) -> bool:
        """Whether what was lent in this generation may have changed: its owner has failed in it, or gone on."""
        failed = self._longs[_FAILED] != 0
        return failed or self._longs[_GENERATION] != generation

    # By the owner

    def clear(self) -> None:
        """Forget whatever was in this memory before."""
        self._bytes[:_SLOTS_AT_BYTES] = bytes(_SLOTS_AT_BYTES)

    def begin(self, generation: int) -> None:
        self.free()
        self._longs[_FAILED] = 0
        self._first = generation * _APART & COUNT_MASK
        self._counts[_PUBLISHED_BYTES // 4] = self._counts[_FINISHED_BYTES // 4] = self._first
        self._longs[_GENERATION] = generation

    def free(self) -> None:
        self._longs[_GENERATION] = 0

    def fail(self) -> None:
        self._longs[_FAILED] = 1

    def count_published(self, sequence: int) -> None:
        self._counts[_PUBLISHED_BYTES // 4] = (self._first + sequence + 1) & COUNT_MASK

    def count_finished(self, sequence: int) -> None:
        self._counts[_FINISHED_BYTES // 4] = (self._first + sequence + 1) & COUNT_MASK

    def inline_area(self, sequence: int) -> torch.Tensor:
        """`INLINE_BYTES` bytes for the part of this step."""
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
        """Fill a slot: slices of the flat tensor `offered`, which lies at `location`, for the ranks in `sends`.

        `offered` None: nothing, of which all slices are empty.
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
        """Read what its owner offers to `rank` at this step. Raises ProtocolError for what no correct member writes."""
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
    """The two rings of a member in one group: `DOUBLE_BUFFER_BYTES` of uint8.

    A futex word at `begun_address` counts the generations that its owner has begun.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._rings = (SlotRing(tensor[:_RING_BYTES]), SlotRing(tensor[_RING_BYTES:]))
        self._longs = (self._rings[0]._longs, self._rings[1]._longs)
        self._begun = tensor_bytes(tensor)[_BEGUN_BYTES : _BEGUN_BYTES + 4].cast("I")
        self.begun_address = tensor.data_ptr() + _BEGUN_BYTES

    def find(self, generation: int) -> SlotRing | None:
        """The ring of this generation; None before its owner has begun it, and after nobody should need it any more."""
        one, other = self._longs
        if one[_GENERATION] == generation:
            return self._rings[0]
        return self._rings[1] if other[_GENERATION] == generation else None

    def of_or_any(self, generation: int) -> SlotRing:
        """The generation's ring; if it was reused meanwhile, either one: both read as empty for it."""
        return self._rings[self._longs[1][_GENERATION] == generation]

    @property
    def newest(self) -> int:
        one, other = self._longs
        return max(one[_GENERATION], other[_GENERATION])

    # By the owner

    def clear(self) -> None:
        """Forget whatever was in this memory before."""
        for ring in self._rings:
            ring.clear()

    def begin(self, generation: int) -> SlotRing:
        """Use a ring for this generation, as the module says. The owner reads nothing of former ones any more."""
        former, current = self._by_age()
        # Where the former one is not free, what was published since is of no use to anybody (see GroupGeneration.open).
        ring = former if current.published(current.generation) and not former.generation else current
        ring.begin(generation)
        self._begun[0] = (self._begun[0] + 1) & COUNT_MASK
        return ring

    @property
    def former(self) -> SlotRing | None:
        """The ring in which others may still read of an earlier generation; None where there is none."""
        ring, _ = self._by_age()
        return ring if ring.generation else None

    def _by_age(self) -> tuple[SlotRing, SlotRing]:
        one, other = self._rings
        return (one, other) if self._longs[0][_GENERATION] <= self._longs[1][_GENERATION] else (other, one)

    def free_former(self) -> None:
        """Give the former ring free: all members that could read it are in the newest generation."""
        self._by_age()[0].free()
