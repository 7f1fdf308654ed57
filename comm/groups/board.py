"""A member's board: a piece of its shared memory where it tells the others which part it offers in which turn.

    published   a futex word: how many turns of this generation its owner has published
    finished    a futex word: of how many of them its owner needs nothing from others any more
    generation  that the board is used in; 0 while it is free
    failed      not 0 when its owner has failed: from then on the tensors that it has lent may change. Who has read one
                looks here afterwards; when an operation ends well, all have read what was lent in it
    entries     one per turn, used in a circle: where the part lies, for whom which elements, the operation's words
    rooms       one per entry, for parts so small that they lie on the board itself

Only the owner writes. It writes an entry first and counts it afterwards; it takes the generation away before it sets
the counts back, and names the new one afterwards: who finds the same generation before and after a count has the right
one. x86-64 shows other processors all this in order, which is why boards are used there only.

There are two boards, so that who is slow still finds in the former one what it needs, whatever views follow:

    a generation begins     on the board of the one before if nothing was published there, else on the free one. Its
                            owner reads nothing of former generations by then
    all others are in it    none of them needs the former board: it becomes free. Who was removed may still read there:
                            it sees in the end that the generation is gone. Before, nothing is published but that its
                            owner has come to a barrier, which nobody completes without all
Nothing here waits or knows of members.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from elastrain.comm.collectives.algorithms import Send
from elastrain.comm.errors import ProtocolError
from elastrain.comm.wire.frames import DTYPES, tensor_bytes

ENTRIES = 4  # so far a member may run ahead of those who need its parts
ROOM_BYTES = 64 << 10
MEMBERS_MAX = 512
WORDS_MAX_BYTES = 400
COUNT_MASK = 0xFFFFFFFF
_HALF = 1 << 31

_PUBLISHED_BYTES, _FINISHED_BYTES = 0, 64  # offsets: each on a cache line of its own
_ERA_BYTES = 68
_GENERATION, _FAILED = 1, 2  # places of 64 bits, beside `published`
_ENTRIES_AT_BYTES = 128
_ENTRY_BYTES = 16 << 10
_HEADER = struct.Struct("<QQIHHBBxxQQ")  # offset, size, segment, words, slices, dtype, lent, and the only slice
_SLICE = struct.Struct("<QQ")
_SLICES_AT_BYTES = _HEADER.size + WORDS_MAX_BYTES
_ROOMS_AT_BYTES = _ENTRIES_AT_BYTES + ENTRIES * _ENTRY_BYTES
_BOARD_BYTES = _ROOMS_AT_BYTES + ENTRIES * ROOM_BYTES
PAIR_BYTES = 2 * _BOARD_BYTES

_APART = 0x9E3779B1  # times the generation: where its counts begin; odd, so that neighbours are far apart
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
assert _SLICES_AT_BYTES + MEMBERS_MAX * _SLICE.size <= _ENTRY_BYTES


def reached(count: int, wanted: int) -> bool:
    """Whether a counter of 32 bits, which may have begun anew, is at `wanted` or past it."""
    return (count - wanted) & COUNT_MASK < _HALF


class Spot(NamedTuple):  # as Entry: made in every turn, where a frozen dataclass takes four times as long
    """Where an offered tensor lies: bytes of a segment, or (segment 0) of the board's room for this turn."""

    segment: int
    offset_bytes: int


_NOWHERE = Spot(segment=0, offset_bytes=0)


class Entry(NamedTuple):
    """What one member offers to one other in a turn: `size_bytes` at `spot`, as elements of `dtype`.

    `lent`: a tensor of its caller's, which may change after a failure.
    """

    lent: bool
    words: bytes
    spot: Spot
    size_bytes: int
    dtype: torch.dtype


class Board:
    """Mine, or a peer's, which can only be read: `_BOARD_BYTES` of uint8."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._bytes = tensor_bytes(tensor)
        self._counts = self._bytes[:_ENTRIES_AT_BYTES].cast("I")
        self._longs = self._bytes[:_ENTRIES_AT_BYTES].cast("Q")
        self.published_address = tensor.data_ptr() + _PUBLISHED_BYTES
        self.finished_address = tensor.data_ptr() + _FINISHED_BYTES
        self._first = 0  # of mine: where the counts of its generation begin

    @property
    def generation(self) -> int:
        return self._longs[_GENERATION]

    def published(self, generation: int) -> int:
        """As far as this generation goes: 0 before and after it."""
        return self._count(_PUBLISHED_BYTES // 4, generation)

    def finished(self, generation: int) -> int:
        """As `published`."""
        return self._count(_FINISHED_BYTES // 4, generation)

    def has_published(self, generation: int, turns: int) -> bool | None:
        """Whether `published` is so many or more; None: it is not, as those who wait need it."""
        return (self._count(_PUBLISHED_BYTES // 4, generation) - turns) & COUNT_MASK < _HALF or None

    def has_finished(self, generation: int, turns: int) -> bool | None:
        """As `has_published`."""
        return (self._count(_FINISHED_BYTES // 4, generation) - turns) & COUNT_MASK < _HALF or None

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
        """Of whatever was in this memory before."""
        self._bytes[:_ENTRIES_AT_BYTES] = bytes(_ENTRIES_AT_BYTES)

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

    def count_published(self, turn: int) -> None:
        self._counts[_PUBLISHED_BYTES // 4] = (self._first + turn + 1) & COUNT_MASK

    def count_finished(self, turn: int) -> None:
        self._counts[_FINISHED_BYTES // 4] = (self._first + turn + 1) & COUNT_MASK

    def room(self, turn: int) -> torch.Tensor:
        """`ROOM_BYTES` bytes for the part of this turn."""
        start = _ROOMS_AT_BYTES + turn % ENTRIES * ROOM_BYTES
        return self.tensor[start : start + ROOM_BYTES]

    def write(
        self, turn: int, *, words: bytes, offered: torch.Tensor | None, spot: Spot, sends: Sequence[Send], lent: bool
    ) -> None:
        """An entry: slices of the flat tensor `offered`, which lies at `spot`, for the ranks that `sends` names.

        None: nothing, of which all slices are empty.
        """
        at = _ENTRIES_AT_BYTES + turn % ENTRIES * _ENTRY_BYTES
        start, stop = (sends[0].start, sends[0].stop) if sends else (0, 0)
        slices = 0
        for send in sends:
            if send.start != start or send.stop != stop:
                start, stop, slices = 0, 0, 1 + max(send.to for send in sends)
                break
        code, size_bytes = (0, 0) if offered is None else (_CODES[offered.dtype], offered.nbytes)
        where = (spot.offset_bytes, size_bytes, spot.segment)
        _HEADER.pack_into(self._bytes, at, *where, len(words), slices, code, lent, start, stop)
        self._bytes[at + _HEADER.size : at + _HEADER.size + len(words)] = words
        if slices:
            for send in sends:
                _SLICE.pack_into(self._bytes, at + _SLICES_AT_BYTES + send.to * _SLICE.size, send.start, send.stop)

    def read(self, turn: int, rank: int) -> Entry:
        """What its owner offers to `rank` in this turn. Raises ProtocolError for what no correct member writes."""
        at = _ENTRIES_AT_BYTES + turn % ENTRIES * _ENTRY_BYTES
        offset, size, segment, words, slices, code, lent, start, stop = _HEADER.unpack_from(self._bytes, at)
        if slices and rank < slices:
            start, stop = _SLICE.unpack_from(self._bytes, at + _SLICES_AT_BYTES + rank * _SLICE.size)
        if words > WORDS_MAX_BYTES or slices > MEMBERS_MAX or code >= len(DTYPES):
            raise ProtocolError(f"an entry with {words} bytes of words, {slices} slices and dtype code {code}")
        dtype = DTYPES[code]
        if not start <= stop <= size // dtype.itemsize or (offset % dtype.itemsize):
            raise ProtocolError(f"elements {start} to {stop} of {size} bytes of {dtype} at {offset}")
        said = bytes(self._bytes[at + _HEADER.size : at + _HEADER.size + words])
        size_bytes = (stop - start) * dtype.itemsize
        spot = Spot(segment=segment, offset_bytes=offset + start * dtype.itemsize) if size_bytes else _NOWHERE
        return Entry(lent=bool(lent), words=said, spot=spot, size_bytes=size_bytes, dtype=dtype)


class Pair:
    """The two boards of a member in one group: `PAIR_BYTES` of uint8. `era`, a futex word: generations begun so far."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._boards = (Board(tensor[:_BOARD_BYTES]), Board(tensor[_BOARD_BYTES:]))
        self._longs = (self._boards[0]._longs, self._boards[1]._longs)
        self._era = tensor_bytes(tensor)[_ERA_BYTES : _ERA_BYTES + 4].cast("I")
        self.era_address = tensor.data_ptr() + _ERA_BYTES

    def find(self, generation: int) -> Board | None:
        """The board of this generation; None while its owner has not begun it, or nobody should need it any more."""
        one, other = self._longs
        if one[_GENERATION] == generation:
            return self._boards[0]
        return self._boards[1] if other[_GENERATION] == generation else None

    def of_or_any(self, generation: int) -> Board:
        """As `find` of a generation that its owner has begun; where that is over, a board on which nothing is of it."""
        return self._boards[self._longs[1][_GENERATION] == generation]

    @property
    def newest(self) -> int:
        one, other = self._longs
        return max(one[_GENERATION], other[_GENERATION])

    # By the owner

    def clear(self) -> None:
        """Of whatever was in this memory before."""
        for board in self._boards:
            board.clear()

    def begin(self, generation: int) -> Board:
        """See the module. The owner reads nothing of former generations any more."""
        former, current = self._by_age()
        # Where the former one is not free, what was published since is of no use to anybody (see Lane.open_up).
        board = former if current.published(current.generation) and not former.generation else current
        board.begin(generation)
        self._era[0] = (self._era[0] + 1) & COUNT_MASK
        return board

    @property
    def former(self) -> Board | None:
        """What others may still read of a generation before the newest one; None where that is not so."""
        board, _ = self._by_age()
        return board if board.generation else None

    def _by_age(self) -> tuple[Board, Board]:
        one, other = self._boards
        return (one, other) if self._longs[0][_GENERATION] <= self._longs[1][_GENERATION] else (other, one)

    def free_former(self) -> None:
        """All who could read the former one are in the newest."""
        self._by_age()[0].free()
