"""Tests of this folder run in a process of their file that has the test device, as those of `tests/contract/late`."""

from __future__ import annotations

import pytest

from tests.contract.late.conftest import process_of_module as process_of_module
from tests.contract.late.conftest import pytest_pyfunc_call as pytest_pyfunc_call


def pytest_itemcollected(item: pytest.Item) -> None:
    """Each file starts a process, and the first of them a fork server: `make check` does without."""
    item.add_marker(pytest.mark.slow)
