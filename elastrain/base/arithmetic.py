"""Integer arithmetic: the splitmix64 hash, the shape of summation trees, and a first-fit allocator of ranges. Pure.

splitmix64 (Steele, Lea and Flood, 2014) is a bijection of 64-bit numbers. All summation trees have one shape, because
the sum of floating-point numbers depends on their order. With one shape, results are bitwise equal on all members,
under every algorithm, and in every run.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def scramble(value: int) -> int:
    """Return splitmix64's output function of `value` modulo 2**64."""
    z = value & MASK
    z = ((z ^ (z >> 30)) * FACTORS[0]) & MASK
    z = ((z ^ (z >> 27)) * FACTORS[1]) & MASK
    return z ^ (z >> 31)


def mix(state: int) -> int:
    """Return the next output of splitmix64 from this state."""
    return scramble(state + GOLDEN)


def split_at(start: int, stop: int) -> int:
    """Return where the leaves `[start, stop)` split: after the largest power of two that is smaller than their number.

    So the left half is always a full binary tree, and does not change when leaves are added at the right. At least two
    leaves are needed.
    """
    return start + (1 << ((stop - start - 1).bit_length() - 1))


class FreeRanges:
    """The free ranges of `[0, size)`, sorted; no two of them touch.

    First fit, because a training step asks for the same sizes in the same order each time. It gets the same ranges
    again, and the memory in use stops growing.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._free)

    @property
    def all_free(self) -> bool:
        """True if no range is taken."""
        return self._free == [(0, self.size)]

    def take(self, length: int, alignment: int = 1) -> int | None:
        """Take the first free range of this length, and return its start, a multiple of `alignment`.

        None if there is none.
        """
        for index, (start, stop) in enumerate(self._free):
            at = -(-start // alignment) * alignment
            if stop - at >= length:
                rest = ((start, at), (at + length, stop))
                self._free[index : index + 1] = [(first, end) for first, end in rest if end > first]
                return at
        return None

    def give(self, start: int, stop: int) -> None:
        """Return a range to the free ones. Raises ValueError if a part of it is free already."""
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
