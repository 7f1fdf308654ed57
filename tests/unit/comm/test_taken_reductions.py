"""The backend takes every reduction that Gloo or NCCL takes, of every dtype, and the pages say which."""

from __future__ import annotations

import re

import pytest
import torch

from docs import reductions
from elastrain.comm.collectives import algorithms
from elastrain.comm.collectives.reducing import Reduction, check_reduction, fold, premultiplied, reason_against

PAIRS = [(name, dtype) for name in reductions.REDUCTIONS for dtypes in reductions.KINDS.values() for dtype in dtypes]


def test_the_table_of_the_pages_is_that_of_the_code() -> None:
    assert reductions.PAGE.read_text() == reductions.page(), "run `python -m docs.reductions`"


@pytest.mark.parametrize("others", [reductions.GLOO, reductions.NCCL], ids=["Gloo", "NCCL"])
def test_what_another_backend_takes_is_taken(others: dict[str, set[str]]) -> None:
    for kind, names in others.items():
        for name in names:
            assert all(reductions.is_taken(name, dtype) for dtype in reductions.KINDS[kind]), (name, kind)


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:Casting complex")
@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_a_pair_is_computed_or_refused_with_a_sentence(name: Reduction, dtype: torch.dtype) -> None:
    parts = [torch.tensor([1.0, 2.0, 4.0]).to(dtype), torch.tensor([1.0, 1.0, 2.0]).to(dtype)]
    out = torch.empty_like(parts[0])
    if reason := reason_against(name, dtype):
        assert not reductions.is_taken(name, dtype)
        with pytest.raises(ValueError, match=re.escape(reason)):
            check_reduction(name, out)
        return
    check_reduction(name, out)
    fold(parts, name, out, steps=algorithms.tree(2))
    left, right = (part.to(torch.float64).to(torch.int64) for part in parts)
    wanted = {
        "sum": left + right,
        "avg": (left + right) / 2,
        "prod": left * right,
        "min": torch.minimum(left, right),
        "max": torch.maximum(left, right),
        "band": left & right,
        "bor": left | right,
        "bxor": left ^ right,
    }[name]
    integral = not (dtype.is_floating_point or dtype.is_complex)
    assert torch.equal(out.to(torch.complex64), (wanted.trunc() if integral else wanted).to(dtype).to(torch.complex64))


def test_unsigned_numbers_above_the_signed_ones_keep_their_order() -> None:
    for dtype in (torch.uint16, torch.uint32):
        high, one = torch.tensor([torch.iinfo(dtype).max], dtype=dtype), torch.tensor([1], dtype=dtype)
        out = torch.empty_like(one)
        fold([high, one], "max", out)
        assert torch.equal(out, high)
        fold([high, one], "sum", out)
        assert int(out) == 0, "a sum wraps around"


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_premultiplied_sum_takes_numbers_and_tensors_as_factors() -> None:
    for kind in reductions.KINDS:
        for dtype in reductions.KINDS[kind]:
            tensor = torch.tensor([1.0, 4.0]).to(dtype)
            for factor in (0.5, torch.tensor([0.5])):
                if reductions.is_taken("premul_sum", dtype):
                    found = premultiplied(tensor, factor)
                    assert found.dtype is dtype and found.to(torch.complex64).real.tolist() == [0.5, 2.0]
                else:
                    with pytest.raises(ValueError, match="premul_sum needs floating point"):
                        premultiplied(tensor, factor)


def test_sparse_tensors_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"this one is torch.sparse_coo: call to_dense\(\) first"):
        check_reduction("sum", torch.eye(2).to_sparse())
