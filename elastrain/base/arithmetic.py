"""splitmix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit numbers. Pure arithmetic.

The shape of every summation tree: where a run of leaves splits in two. Pure arithmetic.

Sums of floating-point numbers depend on their order. One shape for all of them makes results bitwise equal on all
members, whatever the algorithm, and between runs.

Which parts of a stretch of numbers are free: a first-fit allocator. Pure arithmetic.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def scramble(value: int) -> int:
    """The generator's output function, of a number taken modulo 2**64."""
    z = value & MASK
    z = ((z ^ (z >> 30)) * FACTORS[0]) & MASK
    z = ((z ^ (z >> 27)) * FACTORS[1]) & MASK
    return z ^ (z >> 31)


def mix(state: int) -> int:
    """The generator's next output from this state."""
    return scramble(state + GOLDEN)


def split_at(start: int, stop: int) -> int:
    """Where the leaves `[start, stop)` split: after the largest power of two that is smaller than their number.

    So a left half is always a full binary tree, and does not change when leaves are added at the right. At least two
    leaves are needed.
    """
    return start + (1 << ((stop - start - 1).bit_length() - 1))


class FreeRanges:
    """The free ranges of `[0, size)`: sorted, never touching each other.

    First fit, because callers ask for the same sizes in the same order again and again (a training step does): they get
    the same places again, and what is in use stops growing.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._free)

    @property
    def all_free(self) -> bool:
        return self._free == [(0, self.size)]

    def take(self, length: int, alignment: int = 1) -> int | None:
        """The start of the first free range of this length at a multiple of `alignment`; None if there is none."""
        for index, (start, stop) in enumerate(self._free):
            at = -(-start // alignment) * alignment
            if stop - at >= length:
                rest = ((start, at), (at + length, stop))
                self._free[index : index + 1] = [(first, end) for first, end in rest if end > first]
                return at
        return None

    def give(self, start: int, stop: int) -> None:
        """Take a range back. Raises ValueError where a part of it is free already."""
        index = bisect.bisect_left(self._free, (start, stop))
        before = self._free[index - 1] if index else None
        after = self._free[index] if index < len(self._free) else None
        if (before and before[1] > start) or (after and after[0] < stop):
            raise ValueError(f"[{start}, {stop}) is free already")
        if after and after[0] == stop:
            stop = self._free.pop(index)[1]
        if before and before[1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))
