"""Memory of gradients goes from one stream to another on a device, without a wait of the loop."""

from __future__ import annotations

import torch
from torch import nn

from elastrain.device import device_of
from elastrain.runtime.model.gradients import GradientMemory, GradientSlot
from elastrain.runtime.model.partition import describe
from tests.support import late
from tests.support.gradients import flats_of


def test_a_block_that_the_engine_gives_back_is_written_behind_the_engines_work() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to("late")
    port = device_of(torch.device("late"))
    layout = describe(model, torch.optim.SGD(model.parameters(), lr=0.1))
    memory = GradientMemory(layout, lambda numel, dtype: port.empty(numel, dtype).zero_(), apart=True)
    first, second = GradientSlot(memory), GradientSlot(memory)
    first.begin_run((0,))
    flats_of(first, 0)[0].fill_(1.0)
    computed = port.record()
    with port.side_stream():  # the engine's
        computed.wait()
        total = flats_of(first, 0)[0] + 1.0
        first.release()
    before = late.stats()["waits"]
    second.begin_run((0,))
    flats_of(second, 0)[0].fill_(5.0)
    assert late.stats()["waits"] == before
    assert late.races() == []
    port.synchronize()
    assert float(total.cpu()[0]) == 2.0
