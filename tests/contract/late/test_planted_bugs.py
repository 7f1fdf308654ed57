"""Bugs that a device forgives on most days are found each time: as races, by digests, by signals."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
from torch import Tensor

from tests.contract.late import carrying
from tests.support import late, warm


def _given() -> tuple[dict[str, Tensor], list[Tensor]]:
    torch.manual_seed(0)
    state = {name: value.clone() for name, value in carrying.Model().state_dict().items()}
    return state, [torch.randn(5, 6) for _ in range(3)]


def _is_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_without_a_bug_nothing_is_found() -> None:
    made, _ = carrying.on_device(*_given())
    assert _is_equal(made, carrying.on_cpu(*_given())) and late.races() == []


@pytest.mark.parametrize("plant", [plant for plant, found in carrying.PLANTS.items() if found == "race"])
def test_a_missing_edge_is_a_race(plant: str) -> None:
    with pytest.raises(late.RaceError, match=r"(aten::\w+|copy \w+).* stream \d+ .*stream \d+"):
        carrying.on_device(*_given(), plant)


@pytest.mark.parametrize("plant", [plant for plant, found in carrying.PLANTS.items() if found == "digest"])
def test_wrong_values_are_other_values(plant: str) -> None:
    made, _ = carrying.on_device(*_given(), plant)
    assert not _is_equal(made, carrying.on_cpu(*_given()))


def test_the_time_of_launching_is_not_that_of_computing() -> None:
    late.configure(slowness=1e4)
    began_s = time.perf_counter()
    _, seconds = carrying.on_device(*_given())
    assert seconds > 5 * (time.perf_counter() - began_s)


def test_a_host_that_reads_the_devices_memory_ends_with_a_signal() -> None:
    code = """if True:
        from tests.support import late, warm
        from tests.contract.late import carrying, test_planted_bugs as bugs

        late.install()
        carrying.on_device(*bugs._given(), "the host reads the device's memory")"""
    done = warm.run([sys.executable, "-c", code], env={**os.environ, **warm.THERE}, timeout=360)
    assert done.returncode == -signal.SIGSEGV
