"""The warm-up of an absent block: it computes on zeros, and nothing of it stays but compiled code."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elastrain.pipeline.stubs import warm_up as warming
from elastrain.pipeline.stubs.naming import blocks_of
from elastrain.pipeline.stubs.stubs import Stubs
from tests.support.absent_blocks import let_go
from tests.support.pipeline_models import WORDS, Stack
from tests.support.traced import trace

WIDTH = 24
SEEN = list[tuple[torch.Size, bool, bool]]()
"""(shape, is it all zeros, does it need a gradient) of what the layers have computed with."""


class Noisy(nn.Module):
    """A layer that leaves traces wherever a module can: numbers, lists, buffers, streams, hooks and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.work, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH), persistent=False)
        self.calls, self.kept = 0, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            SEEN.append((x.shape, not x.any(), x.requires_grad))
        self.calls += 1
        self.kept.append(x)
        self.average.mul_(0.9).add_(1.0)
        self.average = self.average + random.random() + np.random.rand()
        self.register_forward_hook(lambda *_: None)
        y = torch.dropout(self.work(x), 0.5, True)
        return x + self.norm(y.transpose(1, 2)).transpose(1, 2)


class Model(Stack):
    def __init__(self) -> None:
        super().__init__(WIDTH, 0)
        self.layers = nn.ModuleList(Noisy() for _ in range(3))


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.arange(12).view(2, 6) % WORDS).float().mean()


@pytest.fixture
def member() -> Iterator[tuple[nn.Module, Stubs]]:
    """A member that computes the embedding, and has memory for all other blocks."""
    model = Model()
    traced = trace(model, blocks_of(model), lambda: loss_of(model))
    stubs = Stubs(model, traced, 0, 1)
    SEEN.clear()
    yield model, stubs
    stubs.close()


def traces(model: nn.Module) -> list[Any]:
    """All that a forward may change."""
    buffers = [(name, id(value), value._version, value.clone()) for name, value in model.named_buffers()]
    attributes = [
        (path, name, id(value), len(value) if hasattr(value, "__len__") else value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
    ]
    generators = [torch.get_rng_state().tolist(), random.getstate(), [str(each) for each in np.random.get_state()]]
    modes = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()]
    gradients = [(p.grad, p._version, p.requires_grad) for p in model.parameters()]
    return [*(str(each) for each in buffers), attributes, *generators, *modes, gradients]


def test_a_block_computes_on_zeros_and_leaves_no_trace(member: tuple[nn.Module, Stubs]) -> None:
    model, stubs = member
    before = traces(model)
    assert stubs.warm_up([1, 2]) == {"layers.0": "", "layers.1": ""}
    assert [(torch.Size((2, 6, WIDTH)), True, True)] * 2 == SEEN
    assert traces(model) == before


@pytest.mark.parametrize("left", ["generators", "attributes"])
def test_a_warm_up_that_leaves_traces_is_found(
    member: tuple[nn.Module, Stubs], left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, stubs = member
    before, whole = traces(model), warming.left_as_it_was
    planted = {
        "generators": lambda *_, **__: torch.no_grad(),
        "attributes": lambda module, **_: whole(module, wholly=False, is_eager=False),
    }
    monkeypatch.setattr(warming, "left_as_it_was", planted[left])
    stubs.warm_up([1])
    assert traces(model) != before


def test_the_next_micro_batch_is_computed_as_ever(member: tuple[nn.Module, Stubs]) -> None:
    model, stubs = member
    twin = Model()
    twin.load_state_dict(model.state_dict())
    other = Stubs(twin, trace(twin, blocks_of(twin), lambda: loss_of(twin)), 0, 1)
    losses = []
    for its, of in ((model, stubs), (twin, other)):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        if of is stubs:
            of.warm_up([1, 2, 3])
        of.hold(0, 5)
        of.begin()
        losses.append(loss_of(its))
        of.loss_is_made()
    other.close()
    assert torch.equal(*losses)


def test_parameters_without_values_do_not_matter(member: tuple[nn.Module, Stubs]) -> None:
    model, stubs = member
    for parameter in model.get_submodule("layers.0").parameters():
        parameter.data.fill_(torch.nan)
    assert stubs.warm_up([1]) == {"layers.0": ""}


def test_a_block_that_cannot_compute_on_zeros_is_told_and_does_no_harm(member: tuple[nn.Module, Stubs]) -> None:
    model, stubs = member
    let_go(model, ["layers.0"], ["embed"])

    def fails(*_: object) -> None:
        raise ValueError("no zeros here\nplease")

    model.get_submodule("layers.1.work").register_forward_pre_hook(fails)
    before = traces(model)
    assert stubs.warm_up([2]) == {"layers.1": "ValueError: no zeros here"}
    assert traces(model) == before


@pytest.mark.slow
def test_the_first_micro_batch_of_a_compiled_block_compiles_nothing_more() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = Stack(WIDTH, 3)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    traced = trace(model, blocks_of(model), lambda: loss_of(model))
    stubs = Stubs(model, traced, 0, 1)
    counters.clear()
    assert stubs.warm_up([1]) == {"layers.0": ""}
    compiled = counters["stats"]["unique_graphs"]
    assert compiled >= 1
    stubs.hold(0, 2)
    stubs.begin()
    loss_of(model)
    stubs.loss_is_made()
    stubs.close()
    assert counters["stats"]["unique_graphs"] == compiled
