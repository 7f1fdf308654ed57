"""Tests of this folder run in a process of their file that has the test device, as those of `tests/contract/late`."""

from tests.contract.late.conftest import process_of_module as process_of_module
from tests.contract.late.conftest import pytest_pyfunc_call as pytest_pyfunc_call
