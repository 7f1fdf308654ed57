"""Every cell of the table of what works with what is true: compiled models, mixed precision, checkpoints, LoRA, EMA."""

from __future__ import annotations

import pytest

from tests.support.combinations import Cell, cells, kept, outcome

OFTEN = (Cell("compile before", backend="aot_eager"), Cell("model.compile()", backend="eager"), Cell("ema"))
"""One cell of each kind, for every run of the tests. All of them take several minutes."""


def _holds(cell: Cell) -> None:
    assert outcome(cell) == kept().get(cell.key), cell.key


@pytest.mark.slow
@pytest.mark.parametrize("cell", OFTEN, ids=lambda cell: cell.key)
def test_a_cell_of_each_kind_is_true(cell: Cell) -> None:
    pytest.importorskip("transformers")
    _holds(cell)


@pytest.mark.on_demand
@pytest.mark.parametrize("cell", cells(), ids=lambda cell: cell.key)
def test_every_cell_is_true(cell: Cell) -> None:
    pytest.importorskip("transformers")
    if cell.key not in kept():
        pytest.skip("not tried")
    _holds(cell)
