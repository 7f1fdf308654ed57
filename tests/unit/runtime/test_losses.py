"""What a micro-batch counts is a plain number, however it was computed; what cannot count is refused in a sentence."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from elastrain.errors import ConfigError
from elastrain.runtime.loop.told_numbers import check_loss, check_name, figure_of, weight_of

COUNTS: list[Any] = [
    7,
    7.0,
    np.int64(7),
    np.float32(7),
    np.array(7),
    np.array([7.0]),
    torch.tensor(7),
    torch.tensor([7.0]),
    torch.tensor(7.0, dtype=torch.bfloat16),
    torch.tensor(7.0, requires_grad=True),
    Fraction(7),
]


@pytest.mark.parametrize("weight", COUNTS, ids=lambda w: f"{type(w).__name__} {getattr(w, 'dtype', '')}")
def test_a_count_of_any_kind_becomes_a_plain_number(weight: Any) -> None:
    counts = weight_of(weight)
    assert type(counts) is float
    assert counts == 7.0


def test_a_micro_batch_may_count_nothing() -> None:
    assert weight_of(torch.zeros((), dtype=torch.int64)) == 0.0
    assert weight_of(True) == 1.0


@pytest.mark.parametrize(
    "weight", [float("nan"), float("inf"), -1, torch.tensor(float("nan")), np.float64(-2), 10**400]
)
def test_what_cannot_count_is_refused(weight: Any) -> None:
    with pytest.raises(ConfigError, match="finite number from 0 on"):
        weight_of(weight)


@pytest.mark.parametrize(
    "weight",
    [None, "7", b"7", [7.0], 1j, torch.ones(3), np.ones(2), torch.tensor(1j), np.complex128(1j), np.array(["7"]), {}],
    ids=repr,
)
def test_what_is_not_one_number_is_refused_with_what_came(weight: Any) -> None:
    with pytest.raises(ConfigError, match=r"one number for the whole micro-batch; got"):
        weight_of(weight)


@pytest.mark.parametrize("count", COUNTS, ids=lambda w: f"{type(w).__name__} {getattr(w, 'dtype', '')}")
def test_a_figure_may_be_a_number_of_any_kind(count: Any) -> None:
    assert figure_of("right", count) == 7.0
    assert figure_of("right", torch.tensor(True)) == 1.0
    assert figure_of("change", -3) == -3.0


@pytest.mark.parametrize("value", [None, "7", torch.ones(3), torch.tensor(1j), {}], ids=repr)
def test_what_is_no_figure_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^step\.add\('right', n\) takes one number of the micro-batch; got"):
        figure_of("right", value)


@pytest.mark.parametrize("name", ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_a_figure_may_be_of_an_unusual_dtype(name: str) -> None:
    assert figure_of("right", torch.tensor([3.0]).to(getattr(torch, name))) == 3.0


@pytest.mark.parametrize("name", ["uint4", "int2", "bits8", "float4_e2m1fn_x2"])
def test_dtypes_whose_elements_are_no_numbers_are_refused_by_name(name: str) -> None:
    value = torch.zeros(1, dtype=torch.uint8).view(getattr(torch, name))
    with pytest.raises(ConfigError, match=f"takes one number .*torch.{name}"):
        figure_of("right", value)


def test_a_figure_on_a_device_stays_there_so_that_the_loop_does_not_wait() -> None:
    far = torch.ones((), device="meta")
    assert figure_of("right", far) is far


@pytest.mark.parametrize("name", ["", "x" * 101, 7, None, b"right"])
def test_a_figure_has_a_short_name(name: Any) -> None:
    check_name("x" * 100)
    with pytest.raises(ConfigError, match="name of 1 to 100 characters; got"):
        check_name(name)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (3.0, "got float"),
        (torch.ones(3, requires_grad=True), r"shape \(3,\)"),
        (torch.ones(()), "no_grad"),
        (torch.ones((), dtype=torch.cfloat, requires_grad=True), "complex64"),
    ],
    ids=["a number", "a vector", "no graph", "complex"],
)
def test_what_is_no_loss_is_refused(loss: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_loss(loss)
