"""Stubs of a model on a device: fakes lie where tensors would, and the gradients are those of the whole model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from elastrain.pipeline.stubs.fakes import Fakes, left_as_it_was
from elastrain.pipeline.stubs.generators import device_of
from elastrain.pipeline.stubs.naming import blocks_of
from tests.support import late
from tests.support.pipeline_models import CASES, Case, Layer, Stack, batch_of, loss_of
from tests.support.traced import trace
from tests.unit.pipeline.test_stubs import Chain, assert_equal

QUICK = ("checkpointed", "encoder-decoder")


def _are_those_of_the_whole_model(case: Case) -> None:
    chain = Chain(case, case.cuts, "late")
    under_way = [chain.forward(micro_batch) for micro_batch in range(2)]
    for passes, loss in under_way:
        assert loss.device.type == "late"
        chain.backward(passes, loss)
    found = {name: gradient.cpu() for name, gradient in chain.gradients().items()}
    assert_equal(found, chain.gradients_of_the_whole([0, 1]))
    assert late.races() == []


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in CASES])
def test_gradients_of_a_chain_are_those_of_the_whole_model_on_the_cpu(name: str) -> None:
    _are_those_of_the_whole_model(CASES[name])


class Plain(Stack):
    """Its layers have running statistics and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.BatchNorm1d(24, affine=False) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)
        for layer in self.layers:
            x = layer(x * torch.ones(24, 1))
        logits: Tensor = self.head(x.transpose(1, 2))
        return logits


def test_fakes_of_blocks_without_parameters_lie_on_the_device() -> None:
    _are_those_of_the_whole_model(Case(Plain, (1, 2)))


class Counting(nn.Module):
    """Returns a tensor on the device, and one that is made in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.scale, torch.arange(x.shape[1], device="cpu") * 2.0


class Counted(Layer):
    """Takes a tensor in host memory."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        assert positions is not None and positions.device.type == "cpu"
        return super().forward(x, positions[-1].to(x.device).expand(24))


class Lengths(Stack):
    """A layer takes numbers in host memory that the block before has returned."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.layers[0], self.counting = Counted(24), Counting()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers[0](*self.counting(self.embed(tokens))))
        return logits


def test_tensors_in_host_memory_stay_there() -> None:
    case = Case(Lengths, (2, 3))
    _are_those_of_the_whole_model(case)
    devices = [[each.type for each in cut] for cut in Chain(case, case.cuts, "late").traced.devices]
    assert devices == [[], ["late"], ["late", "cpu"], ["late"], []]


class Noisy(Layer):
    """A layer that cannot run on fakes, draws numbers on the device, and counts what it has computed."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        float(x.sum())
        return super().forward(x) + torch.rand_like(x)


def test_tracing_leaves_the_devices_generator_as_it_was() -> None:
    torch.late.manual_seed(3)
    before = torch.late.get_rng_state()
    model = Stack()
    model.layers[0] = Noisy(24)
    model.to("late")
    tokens, targets = (each.to("late") for each in batch_of(0))
    trace(model, blocks_of(model), lambda: loss_of(model, (tokens, targets)))
    assert torch.equal(torch.late.get_rng_state(), before)
    with left_as_it_was(model, wholly=True):
        torch.rand(3, device="late")
    assert torch.equal(torch.late.get_rng_state(), before)


def test_the_device_of_a_module_is_that_of_its_parameters_or_else_of_its_buffers() -> None:
    assert device_of(nn.Linear(2, 2).to("late")).type == "late"
    assert device_of(nn.BatchNorm1d(2, affine=False).to("late")).type == "late"
    assert device_of(nn.ReLU()).type == "cpu"
    with Fakes():
        assert torch.empty(2, device="late").device.type == "late"
