"""The table of what works with what is the one that the tests' results make."""

from __future__ import annotations

from tests.support.combinations import PAGE, cells, kept, with_table


def test_the_table_is_that_of_the_kept_results() -> None:
    page = PAGE.read_text()
    assert with_table(page, kept()) == page, "run `python -m tests.support.combinations`"


def test_results_are_those_of_cells_that_are_tried() -> None:
    assert kept().keys() <= {cell.key for cell in cells()}
