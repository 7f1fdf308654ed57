"""Tokens of attributes: they differ if a value was changed, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastrain.runtime.model.watched import token_of


@pytest.mark.parametrize("levels", range(1, 6))
def test_a_nested_dict_that_nothing_changes_keeps_its_token(levels: int) -> None:
    value: Any = {"": torch.device("cpu"), "none": {}}
    for _ in range(levels):
        value = {"inner": value}
    kept: list[Any] = []
    first = token_of(value)
    for at in range(20):
        kept.append((at, object()))  # takes the memory of a pair that was made for a look
        assert token_of(value) == first
    value["other"] = 1
    assert token_of(value) != first
