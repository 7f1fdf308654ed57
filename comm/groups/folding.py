"""The canonical fold as a collective: a sum over numbered leaves whose bits do not depend on who holds which of them.

The tree is that of docs/step.md ("Runs and tree"). Made of a group's other collectives; nothing here knows how these
are carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from elastrain.comm.collectives import algorithms
from elastrain.comm.groups.group import Group

Interval = tuple[int, int]


def split(start: int, stop: int) -> int:
    """Where the tree cuts a run of leaves: at the largest power of two below its length, as `algorithms.tree` does."""
    return start + (1 << ((stop - start - 1).bit_length() - 1))


def fold(
    group: Group, partials: Mapping[Interval, Tensor], out: Tensor, *, leaves: int, timeout_s: float | None = None
) -> None:
    """`out` becomes on every member the sum of leaves 0 to `leaves` - 1, added along the fixed binary tree.

    `partials`: what this member holds, by node `(start, stop)` of that tree: the complete sums of these leaves, each of
    `out`'s size and dtype (float32, float64, integers; half precision has to be widened first, for each partial would
    be rounded). Together the members hold each leaf once. Bitwise equal for every such distribution.

    Two rounds: each rank folds one slice of all partials, then gives it to all. It waits. Raises ValueError, on all
    members alike, for partials that are no nodes, overlap or leave a gap; on this one for tensors that do not fit; and
    MemberLost, Aborted, Timeout.
    """
    _check(partials, out)
    held = _tell(group, sorted(partials), leaves, timeout_s)
    _check_cover([interval for intervals in held for interval in intervals], leaves)
    slices = algorithms.cut(out.numel(), group.size)
    own = slices[group.rank][1] - slices[group.rank][0]
    flat = [partials[interval].reshape(-1) for interval in sorted(partials)]
    given = [torch.cat([part[start:stop] for part in flat] or [out.new_empty(0)]) for start, stop in slices]
    taken = [out.new_empty(len(intervals) * own) for intervals in held]
    group.all_to_all(taken, given, timeout_s=timeout_s).wait()
    parts = {
        interval: tensor[index * own : (index + 1) * own]
        for intervals, tensor in zip(held, taken, strict=True)
        for index, interval in enumerate(intervals)
    }
    summed = _node(parts, 0, leaves)
    whole = out.view(-1) if out.is_contiguous() else out.new_empty(out.numel())
    group.all_gather([whole[start:stop] for start, stop in slices], summed, timeout_s=timeout_s).wait()
    if not out.is_contiguous():
        out.copy_(whole.view(out.shape))


def _check(partials: Mapping[Interval, Tensor], out: Tensor) -> None:
    if out.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(f"partials of {out.dtype} have been rounded already: fold them as float32")
    for interval, tensor in partials.items():
        if tensor.shape != out.shape or tensor.dtype != out.dtype:
            raise ValueError(
                f"{out.dtype}{list(out.shape)} expected for {interval}; got {tensor.dtype}{list(tensor.shape)}"
            )


def _tell(group: Group, mine: list[Interval], leaves: int, timeout_s: float | None) -> list[list[Interval]]:
    """What every rank holds, in order. Sizes are told first: one exchange more, and nothing is padded."""
    count = torch.tensor([len(mine)])
    counts = [torch.empty_like(count) for _ in range(group.size)]
    told = torch.tensor([leaves, *(edge for interval in mine for edge in interval)])
    group.all_gather(counts, count, timeout_s=timeout_s).wait()
    heard = [torch.empty(1 + 2 * int(number), dtype=torch.int64) for number in counts]
    group.all_gather(heard, told, timeout_s=timeout_s).wait()
    rows: list[list[Any]] = [tensor.tolist() for tensor in heard]
    if len({row[0] for row in rows}) > 1:
        raise ValueError(f"members fold different numbers of leaves: {[row[0] for row in rows]} by rank")
    return [list(zip(row[1::2], row[2::2], strict=True)) for row in rows]


def _check_cover(intervals: list[Interval], leaves: int) -> None:
    position = 0
    for start, stop in sorted(intervals):
        if start != position or stop <= start or not _is_node(start, stop, leaves):
            raise ValueError(f"nodes of the tree that cover {leaves} leaves once expected; got {sorted(intervals)}")
        position = stop
    if position != leaves:
        raise ValueError(f"nodes of the tree that cover {leaves} leaves once expected; got {sorted(intervals)}")


def _is_node(start: int, stop: int, leaves: int) -> bool:
    low, high = 0, leaves
    while (low, high) != (start, stop):
        if not low <= start < stop <= high or high - low == 1:
            return False
        middle = split(low, high)
        if start < middle < stop:
            return False
        low, high = (low, middle) if stop <= middle else (middle, high)
    return True


def _node(parts: Mapping[Interval, Tensor], start: int, stop: int) -> Tensor:
    held = parts.get((start, stop))
    if held is not None:
        return held
    middle = split(start, stop)
    return _node(parts, start, middle) + _node(parts, middle, stop)
