"""Sums are made along the stated tree, whichever part the result is written over and however many blocks there are."""

from __future__ import annotations

import pytest
import torch

from elastrain.comm.collectives import algorithms
from elastrain.comm.collectives.reducing import Reduction, accumulate_dtype, fold


def _step_by_step(parts: list[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    now = [part.to(accumulate_dtype(part.dtype)) for part in parts]
    for left, right in algorithms.tree(len(parts)):
        now[left] = torch.maximum(now[left], now[right]) if reduction == "max" else now[left] + now[right]
    return (now[0] / len(parts) if reduction == "avg" else now[0]).to(parts[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["sum", "avg", "max"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7, 8])
def test_the_result_may_lie_in_any_part_and_leaves_the_others_alone(
    world: int, reduction: Reduction, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(world)
    parts = [torch.randn(3000, generator=random).to(dtype) for _ in range(world)]
    expected = _step_by_step(parts, reduction)
    for own in (None, *range(world)):
        held = [part.clone() for part in parts]
        out = torch.full_like(parts[0], torch.nan) if own is None else held[own]
        fold(held, reduction, out)
        assert torch.equal(out, expected), f"the result lay in part {own}"
        assert all(torch.equal(held[rank], parts[rank]) for rank in range(world) if rank != own)


@pytest.mark.parametrize("numel", [0, 1, (128 << 10) - 1, (128 << 10) + 1, 300_000])
def test_blocks_are_joined_without_a_seam(numel: int) -> None:
    random = torch.Generator().manual_seed(1)
    parts = [torch.randn(numel, generator=random) for _ in range(4)]
    expected = _step_by_step(parts, "sum")
    fold(parts, "sum", parts[2])
    assert torch.equal(parts[2], expected)
