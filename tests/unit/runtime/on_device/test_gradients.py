"""Gradients of a member on a device: they lie there, have the CPU's bits, and cost the loop's thread no wait."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastrain.device import device_of
from elastrain.errors import ConfigError
from elastrain.runtime.carrying import refused
from elastrain.runtime.carrying.tensor_memory import TensorMemory
from elastrain.runtime.loop.step import weight_of
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.gradients import GradientSlot
from elastrain.runtime.model.partition import describe
from tests.support import late
from tests.unit.runtime.on_device.test_shard_states import executor_on


def _computed(device: str) -> tuple[GradientSlot, int]:
    """Return a slot after a backward of two micro-batches, and the waits of this thread meanwhile."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9), nn.Linear(9, 9)).to(device)
    layout = describe(model, torch.optim.SGD(model.parameters(), lr=0.1))
    memory = TensorMemory(lambda numel, dtype: torch.zeros(numel, dtype=dtype), port=device_of(torch.device(device)))
    state = ModelState(model, layout, memory.empty)
    inputs = torch.linspace(-1, 1, 36).view(2, 2, 9).to(device)
    slot, done = state.new_slot(), list[int]()
    waits = late.stats("MainThread")["waits"]
    slot.begin_run()
    for number, batch in enumerate(inputs.unbind()):
        state.attach(slot)
        if number == 1:
            state.arm(lambda block, touched: done.append(block))
        model(batch).square().mean().backward()
    state.finish()
    assert sorted(done) == list(range(len(layout.blocks)))
    return slot, late.stats("MainThread")["waits"] - waits


def test_a_backward_leaves_its_gradients_on_the_device_without_a_wait() -> None:
    slot, waits = _computed("late")
    assert waits == 0
    assert {view.device.type for view in slot.views.values()} == {"late"}
    assert slot.digests() == _computed("cpu")[0].digests()
    assert late.races() == []


def test_digests_of_gradients_are_submitted_without_a_wait() -> None:
    slot, _ = _computed("late")
    waits = late.stats()["waits"]
    digests = slot.digests_later()
    assert late.stats()["waits"] == waits
    slot.views[0].add_(1)  # what a digest says is what it was asked for
    assert tuple(each() for each in digests) == _computed("cpu")[0].digests()


def test_a_block_that_was_reported_is_not_written_again_for_its_digests() -> None:
    slot, _ = _computed("late")
    port = device_of(torch.device("late"))
    slot.begin_run()  # in which no micro-batch uses a parameter
    slot.settle(0)
    reported = port.record()
    slot.digests_later()
    with port.side_stream("engine"):
        reported.wait()
        slot.views[0].sum()
    assert late.races() == []


def test_the_slot_of_a_check_lies_on_the_device_until_its_step_is_over() -> None:
    executor, memory = executor_on("late"), torch.get_device_module("late")
    before = memory.memory_allocated()
    slot = executor.check_slot()
    assert {view.device.type for view in slot.views.values()} == {"late"}
    nbytes = slot.nbytes
    del slot
    assert memory.memory_allocated() - before >= nbytes  # the loop's stream may still be writing
    executor.check_is_over()
    assert memory.memory_allocated() == before


def test_a_weight_on_the_device_costs_one_wait_and_one_in_host_memory_none() -> None:
    weight = torch.tensor(3.0, device="late")
    waits = late.stats()["waits"]
    assert weight_of(torch.tensor(3.0)) == 3.0 and late.stats()["waits"] == waits
    assert weight_of(weight) == 3.0 and late.stats()["waits"] == waits + 1


def test_a_device_without_float64_is_refused_by_name() -> None:
    port = device_of(torch.device("late"))
    refused.check(port, nn.Linear(2, 2))
    late.configure(float64=False)
    try:
        with pytest.raises(ConfigError, match="late:0 does not compute in float64"):
            refused.check(port, nn.Linear(2, 2))
    finally:
        late.configure(float64=True)
