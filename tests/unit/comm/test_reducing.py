"""Sums are made along the stated tree, whichever part the result is written over and however many blocks there are."""

from __future__ import annotations

import pytest
import torch

from elastrain.comm.collectives import algorithms
from elastrain.comm.collectives.reducing import Reduction, accumulate_dtype, check_reduction, fold


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


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_average_of_integers_is_rounded_toward_zero_as_nccl_does(world: int, dtype: torch.dtype) -> None:
    parts = [torch.tensor([7, 1, 0, -8 if dtype.is_signed else 8], dtype=dtype) for _ in range(world)]
    parts[-1] = torch.tensor([8, 0, 1, -9 if dtype.is_signed else 9], dtype=dtype)
    totals = torch.stack(parts).sum(0).tolist()
    check_reduction("avg", parts[0])
    out = torch.empty_like(parts[0])
    fold(parts, "avg", out)
    assert out.tolist() == [int(total / world) for total in totals]


def test_the_average_over_two_hosts_divides_once() -> None:
    """The sums of each host are not divided, or 5 and 4 of two ranks each would lose a half twice."""
    out = torch.empty(1, dtype=torch.int64)
    fold([torch.tensor([5]), torch.tensor([-16])], "avg", out, count=4)
    assert out.tolist() == [-2]


def test_booleans_have_no_average() -> None:
    with pytest.raises(ValueError, match="booleans have no avg: convert them"):
        check_reduction("avg", torch.zeros(1, dtype=torch.bool))
