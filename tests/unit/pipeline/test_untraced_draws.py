"""Random numbers that are drawn in some micro-batches only: members never go on with different ones in silence."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.draws import first_draw
from tests.support.pipeline_models import Case, Layer, Stack
from tests.support.pipeline_steps import MICRO_BATCHES, Found, alone, chain, in_pipelines

Draw = Callable[[], float]
OTHERS: dict[str, Draw] = {
    "python": random.random,
    "python, normal": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.rand()),
    "numpy, all words": lambda: float(np.random.rand(312)[0]),
    "numpy, normal": lambda: float(np.random.randn()),
}
DRAWN = [
    pytest.param(draw, id=name, marks=[] if name in ("python", "numpy") else pytest.mark.slow)
    for name, draw in OTHERS.items()
]
"""In whole steps: that each of them shows, and how, is seen by itself below."""


class Scaling(Layer):
    """Multiplies by a number that it draws, where the micro-batch is `due`."""

    draw: Draw | None = None
    is_due = False

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        x = super().forward(x, positions)
        return x if self.draw is None or not self.is_due else x * (1 + self.draw())


class Sometimes(Stack):
    """Layers, or code behind them, draw in some micro-batches only, not in the first; code in `always` in each."""

    def __init__(self, inside: Mapping[int, Draw], behind: Mapping[int, Draw], always: frozenset[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaling(24) for _ in range(4))
        self.inside, self.behind, self.always = inside, behind, always
        self.first: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        self.first = tokens if self.first is None else self.first
        is_due = not torch.equal(tokens, self.first)
        x, number = self.embed(tokens), 0.0
        for place, layer in enumerate(self.layers):
            layer.draw, layer.is_due = self.inside.get(place), is_due or place in self.always
            x = layer(x, torch.full((24,), number))
            if is_due and place in self.behind:
                number += self.behind[place]()
        logits: Tensor = self.head(x)
        return logits


def case_of(
    inside: Mapping[int, Draw], behind: Mapping[int, Draw], always: frozenset[int] = frozenset()
) -> tuple[Case, Callable[[], Found]]:
    """A model, and what two members make of it: the first one has three of its layers."""
    case = Case(lambda: Sometimes(inside, behind, always), (4, 5))
    plan = chain(("a", "b"), (4,), MICRO_BATCHES)
    return case, lambda: in_pipelines(case, plan, ("a", "b"), 1).found


@pytest.mark.parametrize("draw", DRAWN)
def test_a_block_that_draws_for_the_first_time_behind_the_tracing_pass_is_named(draw: Draw) -> None:
    """Each member would have its first number where one worker has its first and its second."""
    _, train = case_of({1: draw, 3: draw}, {})
    with pytest.raises(ConfigError, match=r"block 'layers\.1' drew random numbers of Python or NumPy in this"):
        train()


@pytest.mark.parametrize("draw", DRAWN)
def test_code_that_draws_for_the_first_time_behind_a_block_that_always_does_is_named(draw: Draw) -> None:
    _, train = case_of({0: draw}, {2: draw}, frozenset({0}))
    with pytest.raises(ConfigError, match=r"code behind block 'layers\.2' drew numbers of Python or NumPy in this"):
        train()


def test_code_that_draws_torchs_numbers_behind_a_block_that_does_is_named() -> None:
    """Its layers drop out, so that only the member of the layer above goes on where it has ended."""
    _, train = case_of({}, {2: lambda: torch.rand([]).item()})
    with pytest.raises(ConfigError, match=r"code behind block 'layers\.2' drew random numbers of torch in this"):
        train()


@pytest.mark.parametrize("draw", DRAWN)
def test_what_all_members_draw_alike_may_be_drawn_whenever_code_likes(draw: Draw) -> None:
    case, train = case_of({}, {0: draw, 2: draw})
    assert train() == alone(case, 1).found


@pytest.mark.parametrize("draw", DRAWN)
def test_one_block_of_those_that_always_draw_may_draw_otherwise(draw: Draw) -> None:
    case, train = case_of({0: draw, 1: draw}, {}, frozenset({0, 1}))
    assert train() == alone(case, 1).found


@pytest.mark.parametrize("draw", OTHERS.values(), ids=OTHERS)
def test_the_first_draw_shows_without_a_copy_of_the_state(draw: Draw) -> None:
    kept = random.getstate(), np.random.get_state()
    try:
        random.seed(3)
        np.random.seed(3)
        before = first_draw()
        assert before == first_draw()
        draw()
        assert first_draw() != before
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
