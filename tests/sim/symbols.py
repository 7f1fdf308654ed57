"""Arithmetic with symbols: a number is the hash of how it came to be, and lies in a place that can be written again.

A gradient slot holds one symbol per (block, shard, lane). Whoever zeroes it under another's partial, takes a stale sum
for a whole one or reads what was released gets another symbol, and so another digest. What is sent is a reference:
reading it later fails if the place has another content by then, as it would over shared memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from elastrain.job.values import Record, Shape

OVERFLOWS = 32
"""One finished gradient in so many is out of range; a step has seven."""
RELEASED = "released"
NOTHING = "nothing"
"""The gradient of a frozen shard."""
Key = TypeVar("Key", bound=Hashable)


class Violation(AssertionError):  # noqa: N818  named as what it is: a broken invariant
    """An invariant does not hold."""


def symbol(*parts: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class Place(Protocol):
    @property
    def value(self) -> Any: ...


@dataclass(eq=False)
class Cell:
    """A buffer, or the model's parameters of one shard."""

    value: Any
    is_flipped: bool = False
    """It has changed by itself, so that nobody is to blame for it."""

    def flip(self) -> None:
        self.value, self.is_flipped = symbol("flipped", self.value), True  # never back to what it was


class Slot:
    """One copy of all gradients."""

    def __init__(self, keys: Sequence[tuple[int, int, int]]) -> None:
        self._keys = keys
        self.values: dict[tuple[int, int, int], Any] = {}
        self.flipped: set[tuple[int, int, int]] = set()
        """Those that have changed by themselves."""
        self.zero()

    def zero(self) -> None:
        self.values = dict.fromkeys(self._keys, 0)
        self.flipped.clear()

    def release(self) -> None: ...

    def accumulate(self, key: tuple[int, int, int], gradient: int) -> None:
        """As a backward does: it adds to what is there, which is nothing only where somebody has zeroed it."""
        before = self.values[key]
        self.values[key] = gradient if before == 0 else symbol("onto", before, gradient)


@dataclass(eq=False)
class Lane:
    """A shard's part of a slot."""

    slot: Slot
    key: tuple[int, int, int]

    @property
    def value(self) -> Any:
        return self.slot.values[self.key]

    @property
    def is_flipped(self) -> bool:
        return self.key in self.slot.flipped

    def flip(self) -> None:
        self.slot.values[self.key] = symbol("flipped", self.value)
        self.slot.flipped.add(self.key)


@dataclass(eq=False)
class Ref:
    """A place in some member's memory, as it was when it was sent."""

    place: Place
    what: str
    sent: Any

    @property
    def value(self) -> Any:
        if getattr(self.place, "is_flipped", False):
            return self.place.value
        if self.place.value != self.sent:
            raise Violation(f"{self.what} was released or overwritten before it was read")
        return self.sent


class Script:
    """The states that a script asked for, as it has them."""

    def __init__(self) -> None:
        self.states: dict[int, State] = {}

    def gather(self, state: State, is_intact: Callable[[], bool]) -> bool:
        copy = State(state.shard, Cell(state.cell.value))
        if found := is_intact():
            self.states.setdefault(state.shard, copy)  # as the product does
        return found


@dataclass(eq=False)
class State:
    shard: int
    cell: Cell


class Shelf(Generic[Key]):
    """States by key. What is taken off is released, unless it is the model's own memory."""

    def __init__(self, model: Sequence[Cell]) -> None:
        self.outside: frozenset[int] = frozenset()
        self.bound: set[int] = set()
        self._model = model
        self._states: dict[Key, State] = {}

    def __getitem__(self, key: Key) -> State:
        return self._states[key]

    def __setitem__(self, key: Key, state: State) -> None:
        if (state.shard in self.bound) != (state.cell is self._model[state.shard]):
            raise Violation(f"the store takes the state of shard {state.shard} for that of another role")
        before = self._states.get(key)
        if before is not None and before is not state:
            self._release(before)
        self._states[key] = state

    def __delitem__(self, key: Key) -> None:
        self._release(self._states.pop(key))

    def __contains__(self, key: object) -> bool:
        return key in self._states

    def __iter__(self) -> Iterator[Key]:
        return iter(self._states)

    def pop(self, key: Key, /) -> State:
        return self._states.pop(key)

    def copy(self, key: Key) -> State:
        state = self._states[key]
        return State(state.shard, Cell(state.cell.value))

    copy_to_host, take_out = copy, pop

    def adopt(self, key: Key, other: Shelf[Any], theirs: Any) -> None:
        self[key] = other.pop(theirs)

    def size_bytes(self, key: Key) -> int:
        return 1 << 20

    def _release(self, state: State) -> None:
        if state.cell is not self._model[state.shard]:
            state.cell.value = RELEASED


class Symbols:
    """The port of `elastrain.buffers` without numbers. `flip()` is 1 where the device computes wrongly this time."""

    def __init__(self, shape: Shape, frozen: frozenset[int], flip: Callable[[], int]) -> None:
        self.model = [Cell(symbol("init", shard)) for shard in range(len(shape.shards))]
        self.awaited: set[int] = set()
        """Shards that have memory and no values for the script yet."""
        self.stored: tuple[int, ...] | None = None
        """What the checkpoint has of each shard, if the job starts from one."""
        self._read: dict[int, int] = {}
        self.hyper: dict[int, str] = {}
        self.is_behind = False
        """Whether the work at hand is some that nobody waits for: there the device may compute wrongly."""
        self._flip = flip
        self._frozen = frozen
        self._blocks = [shard.lanes for shard in shape.shards]
        self.keys = [
            (block, shard, lane)
            for shard, blocks in enumerate(self._blocks)
            for lane, block in enumerate(blocks)
            if shard not in frozen
        ]

    def new_slot(self) -> Slot:
        return Slot(self.keys)

    def add_block(self, slot: Slot, later: Slot, block: int) -> None:
        for key in self.keys:
            if key[0] == block:
                slot.values[key] = symbol("+", slot.values[key], later.values[key])

    def lane(self, slot: Slot, shard: int, lane: int) -> Place:
        if shard in self._frozen:
            return Cell(NOTHING)
        return Lane(slot, (self._blocks[shard][lane], shard, lane))

    def new_buffer(self, like: Place) -> Cell:
        return Cell(RELEASED)

    def new_kept(self, like: Place) -> None:
        return None

    def kind(self, tensor: Place) -> str:
        return "any"

    def add(self, shard: int, left: Place, right: Place, out: Cell) -> None:
        out.value = NOTHING if shard in self._frozen else symbol("+", left.value, right.value)

    def copy(self, source: Place, out: Cell) -> None:
        out.value = source.value

    def square_norm(self, shard: int, total: Place) -> float:
        value = total.value
        if shard in self._frozen:
            return 0.0
        return math.inf if value % OVERFLOWS == 0 else (value % 997) / 3.0

    def read(self, shards: Sequence[int], left_alone: Container[int] = ()) -> None:
        """From the checkpoint: all parameters into the model but those left alone, and these shards' states beside."""
        assert self.stored is not None
        for shard, (cell, value) in enumerate(zip(self.model, self.stored, strict=True)):
            if shard not in left_alone:
                cell.value = value
        self._read.update({shard: self.stored[shard] for shard in shards})

    def checksum(self, tensor: Place) -> int:
        return symbol("checksum", tensor.value)

    def pack_checksums(self, checksums: Sequence[int]) -> Cell:
        return Cell(tuple(checksums))

    def is_far(self, tensor: Place) -> bool:
        return False

    def unpack_checksums(self, packed: Place) -> list[int]:
        return list(packed.value)

    def create(self, shard: int, *, bound: bool) -> State:
        home = self.model[shard]
        value = home.value if self.stored is None else self._read.pop(shard)
        if bound:
            home.value = value
        return State(shard, home if bound else Cell(value))

    def update(self, items: Sequence[tuple[State, Place, tuple[int, ...]]], record: Record) -> None:
        for state, gradient, touched in items:
            if not record.skipped:
                told = (record.contribution, record.square_norm, record.scaler, record.step)
                how = (self.hyper[record.step], touched)
                state.cell.value = symbol("update", state.cell.value, gradient.value, *how, *told)
            if self.is_behind:
                state.cell.value ^= self._flip()

    def bind(self, state: State, *, is_new: bool = False) -> None:
        home = self.model[state.shard]
        self.awaited.discard(state.shard)
        if state.cell is not home:
            home.value = state.cell.value
            state.cell = home

    def show(self, state: State) -> None:
        self.awaited.discard(state.shard)
        self.model[state.shard].value = state.cell.value

    def unbind(self, state: State) -> bool:
        if state.cell is not self.model[state.shard]:
            return False
        state.cell = Cell(state.cell.value)
        return True

    def digest(self, state: State) -> int:
        return symbol("state", state.cell.value)

    def has_master(self, shard: int) -> bool:
        return False

    def digest_published(self, shard: int, state: State | None) -> int:
        return symbol("parameters", self.model[shard].value)

    def parameters_bytes(self, shard: int) -> int:
        return 1 << 20

    def parameters(self, shard: int, part: tuple[int, int] | None = None) -> Cell:
        return self.model[shard]

    def take_parameters(self, shard: int, published: Place, part: tuple[int, int] | None = None) -> None:
        value = published.value
        if part is None:
            self.awaited.discard(shard)
        elif part[0] + 1 < part[1]:
            # Links keep the order of pieces. Before the last one the memory has parts of two versions.
            value = symbol("torn", value, part)
        self.model[shard].value = value

    def hold(self, blocks: Collection[int] | None, unused: list[Place] | None = None) -> None:
        for buffer in unused or ():
            buffer.value = RELEASED
        for shard, lanes in enumerate(self._blocks):
            if blocks is not None and not any(block in blocks for block in lanes):
                # Whoever still works on it, or reads what was sent of it, finds nothing there.
                self.model[shard].value = RELEASED
                self.awaited.discard(shard)
            elif self.model[shard].value == RELEASED:
                self.awaited.add(shard)

    def pack(self, state: State, digest: int | None = None, part: tuple[int, int] | None = None) -> list[Place]:
        return [Cell(state.shard), Cell(self.digest(state) if digest is None else digest), state.cell]

    def taken_piece(self, piece: Sequence[Place]) -> list[Cell]:
        return [Cell(place.value) for place in piece]

    def unpack(self, *pieces: Sequence[Place], in_place: bool = False) -> tuple[State, int]:
        shard, digest, _ = pieces[0]
        values = list(dict.fromkeys(cell.value for _, _, cell in pieces))
        # Pieces of two versions.
        value = values[0] if len(values) == 1 else symbol("torn", values)
        return State(shard.value, Cell(value ^ self._flip())), digest.value
