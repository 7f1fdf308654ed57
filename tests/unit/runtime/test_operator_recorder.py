"""The record of a micro-batch: which module called an operator, on which way, and where values came from."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastrain.integrity.bit_traces import ANYWHERE, LOOP, OperatorCall
from elastrain.runtime.bits.operator_recorder import OperatorRecorder, digest_of
from elastrain.runtime.bits.value_sources import ValueSources


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = checkpoint(self.second, x, use_reentrant=False)
        return y * 2


def recorded(model: nn.Module, *, fill: int = 0) -> list[OperatorCall]:
    torch.manual_seed(0)
    with OperatorRecorder(model, fill) as recorder:
        (model(torch.ones(2, 3)).sum() * 3).backward()
    return recorder.events


def test_operators_are_told_with_their_module_and_their_way() -> None:
    model = Net()
    events = recorded(model)
    places = {(each.module, each.way) for each in events}
    assert {("first", "forward"), ("second.0", "forward"), ("second.1", "recomputed"), (LOOP, "forward")} <= places
    tanh = [each for each in events if each.what == "aten.tanh_backward.default"]
    assert [(each.module, each.way) for each in tanh] == [("second.1", "backward")]
    products = {each.module for each in events if each.what == "aten.mm.default" and each.way == "backward"}
    assert products == {"first", "second.0"}
    model.zero_grad()
    assert recorded(model) == events


def test_an_event_tells_what_the_operator_got_and_what_it_draws_from() -> None:
    own = torch.Generator().manual_seed(1)
    with OperatorRecorder(nn.Identity(), 0) as recorder:
        torch.ones(3) * 2.0, torch.ones(3) * 3.0, torch.randn(3, generator=own), torch.randn(3)
    told = {(each.what, each.draws) for each in recorder.events}
    assert {("aten.randn.generator", "own"), ("aten.randn.default", "default"), ("aten.mul.Tensor", "")} <= told
    one, other = (each for each in recorder.events if each.what == "aten.mul.Tensor")
    assert one.inputs != other.inputs
    assert one.output != other.output


def test_memory_that_nothing_was_written_to_is_filled_and_not_recorded() -> None:
    found = []
    for fill in (0, 1):
        with OperatorRecorder(nn.Identity(), fill) as recorder:
            found += [torch.empty(2), torch.empty(2, dtype=torch.int64), torch.empty_like(torch.ones(2))]
        assert not [each for each in recorder.events if "empty" in each.what]
    assert [each.tolist() for each in found] == [[0.5] * 2, [0] * 2, [0.5] * 2, [-3.0] * 2, [1] * 2, [-3.0] * 2]


def test_a_digest_sees_values_in_nested_things_and_no_addresses() -> None:
    assert digest_of({"a": [torch.ones(2), 1]}) == digest_of({"a": [torch.ones(2), 1]})
    assert digest_of({"a": [torch.ones(2), 1]}) != digest_of({"a": [torch.ones(2), 2]})
    assert digest_of(object()) == digest_of(object())


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: random.Random(1).random, {LOOP: ["python random"]}),
        (lambda: random.random, {}),
        (lambda: time.monotonic, {LOOP: ["clock"]}),
        (lambda: np.random.default_rng(1).normal, {ANYWHERE: ["numpy generator"]}),
        (lambda: np.random.normal, {}),
    ],
    ids=("python's own", "python's", "clock", "numpy's own", "numpy's"),
)
def test_sources_of_values_are_told(make: Callable[[], Callable[[], object]], told: dict[str, list[str]]) -> None:
    source = make()
    with ValueSources(lambda: LOOP) as sources:
        source()
    assert sources.by_module() == told
