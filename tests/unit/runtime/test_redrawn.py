"""Random numbers in the backwards of a pipeline: those of one worker, or a sentence, and never others in silence."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastrain.errors import ConfigError
from tests.support.pipeline_models import DRAWN, Case, Layer, Stack
from tests.support.pipeline_steps import MICRO_BATCHES, Found, alone, chain, in_pipelines

MEMBERS = ("a", "b", "c")
Draw = Callable[[], float]
DRAWS: dict[str, Draw] = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),
    "numpy, normal": lambda: float(np.random.randn()),
}


def trained(case: Case, cuts: tuple[int, ...], run_length: int = 1) -> Found:
    members, runs = MEMBERS[: len(cuts) + 1], -(-MICRO_BATCHES // run_length)
    return in_pipelines(case, chain(members, cuts, runs), members, run_length).found


@pytest.mark.slow
@pytest.mark.parametrize("run_length", [1, 2])
@pytest.mark.parametrize("case", DRAWN)
def test_what_is_computed_again_draws_what_it_draws_in_one_worker(case: str, run_length: int) -> None:
    assert trained(DRAWN[case], DRAWN[case].cuts, run_length) == alone(DRAWN[case], run_length).found


class Hooked(Stack):
    """The gradient behind one layer is scaled by a number that is drawn when it is made."""

    def __init__(self, place: int, draw: Draw) -> None:
        super().__init__()
        self.layers[place] = Scaled(draw)


class Scaled(Layer):
    def __init__(self, draw: Draw) -> None:
        super().__init__(24)
        self.draw = draw

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        x = super().forward(x, positions)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * (1 + self.draw()))
        return x


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_backward_that_draws_behind_others_is_refused_with_its_blocks(draw: Draw) -> None:
    with pytest.raises(ConfigError, match=r"the backward of blocks 'embed' to 'layers\.1' drew random numbers"):
        trained(Case(lambda: Hooked(1, draw), (3, 5)), (3,))


@pytest.mark.slow
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_backward_that_draws_with_the_loss_draws_what_one_worker_does(draw: Draw) -> None:
    case = Case(lambda: Hooked(3, draw), (3, 5))
    assert trained(case, (3,)) == alone(case, 1).found


class Partly(Layer):
    """A part of it is computed again, and draws by no stream that is set or kept."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        again: Tensor = checkpoint(super().forward, x, positions, use_reentrant=False, preserve_rng_state=False)
        return again


def _partly() -> nn.Module:
    model = Stack()
    model.layers[1] = Partly(24)
    return model


def test_a_part_that_is_computed_again_without_its_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"drew random numbers of torch, .* preserve_rng_state=True"):
        trained(Case(_partly, (3, 5)), (3,))


class Drawn(Stack):
    """Drops out behind a layer; in some micro-batches a number is drawn there, too, which counts further down."""

    first: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        self.first = tokens if self.first is None else self.first
        x, number = self.embed(tokens), 0.0
        for place, layer in enumerate(self.layers):
            x = layer(x, torch.full((24,), number))
            if place == 0:
                x = nn.functional.dropout(x, 0.1)
                number = 0.0 if torch.equal(tokens, self.first) else torch.rand(()).item()
        logits: Tensor = self.head(x)
        return logits


def test_a_number_that_is_drawn_in_some_micro_batches_behind_a_dropout_is_refused() -> None:
    """Whoever has fakes there has drawn nothing yet."""
    with pytest.raises(ConfigError, match=r"code behind block 'layers\.0' drew random numbers of torch in this"):
        trained(Case(Drawn, (3, 5)), (3,))


def test_where_the_loss_is_it_draws_what_one_worker_does() -> None:
    case = Case(_partly, (2, 5))
    assert trained(case, (2,)) == alone(case, 1).found
