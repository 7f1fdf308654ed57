"""The shape of every summation tree: where a run of leaves splits in two. Pure arithmetic.

Sums of floating-point numbers depend on their order. One shape for all of them makes results bitwise equal on all
members, whatever the algorithm, and between runs.
"""

from __future__ import annotations


def split_at(start: int, stop: int) -> int:
    """Where the leaves `[start, stop)` split: after the largest power of two that is smaller than their number.

    So a left half is always a full binary tree, and does not change when leaves are added at the right. At least two
    leaves are needed.
    """
    return start + (1 << ((stop - start - 1).bit_length() - 1))
