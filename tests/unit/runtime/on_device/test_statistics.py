"""Running statistics on a device: the bits of the host, and no wait of the training loop."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from elastrain.device import device_of
from elastrain.errors import ConfigError
from elastrain.runtime.model import statistics
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.gradients import GradientSlot
from elastrain.runtime.model.partition import describe
from tests.support import late


def _model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6)).to(device)


def _state(model: nn.Module, device: str) -> ModelState:
    port = device_of(torch.device(device))
    layout = describe(model, torch.optim.SGD(model.parameters(), lr=0.0))
    return ModelState(model, layout, lambda numel, dtype: port.empty(numel, dtype).zero_())


def _run(model: nn.Module, state: ModelState, slot: GradientSlot, batch: Tensor, weight: float) -> None:
    state.statistics.begin()
    model(batch)
    state.statistics.give(state.statistics.take(), slot.statistics, weight)
    state.statistics.end()


@pytest.mark.parametrize("spoilt", [False, True])
def test_statistics_of_a_run_have_the_bits_of_the_host_and_nobody_waits(spoilt: bool) -> None:
    found = []
    for device in ("cpu", "late"):
        model = _model(device)
        state = _state(model, device)
        slot = state.new_slot()
        batches = [torch.randn(8, 6, generator=torch.Generator().manual_seed(n)) for n in range(3)]
        if spoilt:
            batches[1][2, 3] = torch.nan  # of weight 0: left out
        batches = [batch.to(device) for batch in batches]
        before = late.stats()["waits"]
        for weight, batch in zip((1.0, 0.0, 1.0), batches, strict=True):
            _run(model, state, slot, batch, weight)
        assert late.stats()["waits"] == before
        home = state.statistics._pairs()
        maps = [slot.statistics[leaf].clone() for leaf in sorted(slot.statistics)]
        for value, its in home:
            assert value.device == its.device == torch.device(device, None if device == "cpu" else 0)
        state.statistics.refresh()
        found.append([each.cpu() for each in maps])
        assert bool(torch.isfinite(torch.cat(found[-1])).all())
        assert statistics.square_norm(maps[0]) == 0.0
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    assert late.races() == []


class Later:
    """What reads small values of a step together."""

    def __init__(self) -> None:
        self.asked: list[tuple[Tensor, Callable[[Tensor], None]]] = []

    def ask(self, values: Tensor, read: Callable[[Tensor], None]) -> None:
        self.asked.append((values, read))

    def fetch(self) -> None:
        for values, read in self.asked:
            read(values.view(torch.uint8).cpu())
        self.asked.clear()


def test_a_changed_statistic_is_refused_by_name_when_the_flags_are_read() -> None:
    model = _model("late")
    state, later = _state(model, "late"), Later()
    before = late.stats()["waits"]
    state.statistics.refresh()
    state.statistics.check_settled(later.ask)
    assert late.stats()["waits"] == before
    later.fetch()
    model[3].running_mean[2] = 7.0
    state.statistics.check_settled(later.ask)
    with pytest.raises(ConfigError, match=re.escape("running statistic '3.running_mean' was changed")):
        later.fetch()
    with pytest.raises(ConfigError, match=re.escape("running statistic '3.running_mean' was changed")):
        state.statistics.check_settled()
    state.statistics.refresh()
    model[1].running_var[0] = torch.nan  # of a micro-batch that is left out
    state.statistics.check_settled()
