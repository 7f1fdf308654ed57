"""Combining the ranks' tensors along `algorithms.tree`: bitwise equal on all members and between runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from elastrain.comm import algorithms
from elastrain.comm.operations import Reduction

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "prod": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_CHUNK_ELEMENTS = 32 << 10  # so that the inner sums of a chunk stay in the cache


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of it are made in: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def fold(
    parts: Sequence[torch.Tensor],
    reduction: Reduction,
    out: torch.Tensor,
    *,
    steps: Sequence[tuple[int, int]] | None = None,
    count: int | None = None,
) -> None:
    """Combine flat tensors along `steps` into `out`, which is one of them or overlaps none.

    `steps`: as of `algorithms.tree`, the default. `count`: how many ranks the parts are of, for `avg`, if not one each.
    Half precision is accumulated in float32 and rounded once, where `out` is of half precision.
    """
    combine, steps = _COMBINE[reduction], algorithms.tree(len(parts)) if steps is None else steps
    inner = wide(out.dtype)
    sums = {left: torch.empty(min(_CHUNK_ELEMENTS, out.numel()), dtype=inner) for left, _ in steps[:-1]}
    for start in range(0, out.numel(), _CHUNK_ELEMENTS):
        target = out[start : start + _CHUNK_ELEMENTS]
        now = [part[start : start + _CHUNK_ELEMENTS].to(inner) for part in parts]
        for left, right in steps[:-1]:
            now[left] = combine(now[left], now[right], out=sums[left][: target.numel()])
        if steps and inner == out.dtype:
            total = combine(now[steps[-1][0]], now[steps[-1][1]], out=target)
        else:
            total = combine(now[steps[-1][0]], now[steps[-1][1]]) if steps else now[0]
        if reduction == "avg":
            total = (
                torch.div(total, count or len(parts), out=total) if total is target else total / (count or len(parts))
            )
        if total is not target and total.data_ptr() != target.data_ptr():
            target.copy_(total)


def check_reduction(reduction: Reduction, tensor: torch.Tensor) -> None:
    """Raises ValueError for a reduction that is not offered, or not for this dtype."""
    if reduction not in _COMBINE:
        raise ValueError(f"reductions are {', '.join(_COMBINE)}; got {reduction!r}")
    if reduction.startswith("b") and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{reduction} needs integers or booleans; got {tensor.dtype}")
    if reduction in ("min", "max") and tensor.is_complex():
        raise ValueError(f"complex numbers have no {reduction}")
    if reduction == "avg" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"avg needs floating point numbers; got {tensor.dtype}")
