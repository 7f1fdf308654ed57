"""Random numbers that are drawn on a device: members never go on with different ones in silence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.generators import Generators
from tests.support.pipeline_models import Case, Layer, Stack
from tests.unit.pipeline.test_stubs import Chain

Draw = Callable[[], Tensor]
PLACES = ("cpu", "late")


class Drawing(Layer):
    """Adds a number that it draws, in the forward or, by a checkpoint, in the backward once more."""

    device = "late"
    is_due = is_again = False

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        x = super().forward(x, positions)
        if self.is_again:
            again: Tensor = checkpoint(self._add, x, use_reentrant=False, preserve_rng_state=False)
            return again
        return self._add(x) if self.is_due else x

    def _add(self, x: Tensor) -> Tensor:
        return x * torch.rand(1, device=self.device).to(x.device)


class Sometimes(Stack):
    """The second layer draws from its second micro-batch on, and so does code behind it."""

    def __init__(self, device: str, behind: str = "") -> None:
        super().__init__()
        self.layers[1] = Drawing(24)
        self.layers[1].device, self.behind, self.calls = device, behind, -1

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x, layer = self.embed(tokens), self.layers[1]
        layer.is_due = self.calls > 0
        x = layer(self.layers[0](x))
        if self.behind and self.calls > 0:
            x = x + torch.rand(24, device=self.behind).to(x.device)
        logits: Tensor = self.head(self.layers[2](x))
        return logits


def _two_micro_batches(model: Callable[[], Stack]) -> None:
    chain = Chain(Case(model, (3, 4)), (3,), "late")
    for micro_batch in range(2):
        chain.forward(micro_batch)


@pytest.mark.parametrize("device", PLACES)
def test_a_block_may_draw_in_some_micro_batches(device: str) -> None:
    _two_micro_batches(partial(Sometimes, device))


@pytest.mark.parametrize("device", PLACES)
def test_code_that_draws_behind_such_a_block_is_named(device: str) -> None:
    with pytest.raises(ConfigError, match=r"code behind block 'layers\.1' drew random numbers of torch in this"):
        _two_micro_batches(partial(Sometimes, device, device))


class Again(Stack):
    """A part of the second layer is computed again, and draws other numbers then."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layers[1] = Drawing(24)
        self.layers[1].device, self.layers[1].is_again = device, True


@pytest.mark.parametrize("device", PLACES)
def test_a_backward_that_draws_on_the_device_is_named(device: str) -> None:
    chain = Chain(Case(partial(Again, device), (3, 4)), (3,), "late")
    with pytest.raises(
        ConfigError, match=r"the backward of blocks 'embed' to 'layers\.1' drew random numbers of torch"
    ):
        chain.backward(*chain.forward(0))


def test_a_device_whose_module_shows_no_generators_is_asked_for_its_state() -> None:
    with patch.object(torch.late, "default_generators", ()):
        generators = Generators(torch.device("late", 0))
    torch.late.manual_seed(5)
    before = generators.seeds_and_states()
    assert before[1][0] == 5 and before == generators.seeds_and_states()
    torch.rand(1, device="late")
    assert generators.seeds_and_states()[1] != before[1] and generators.states()[0] == before[0][1]
