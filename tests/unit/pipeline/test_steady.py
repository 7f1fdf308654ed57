"""A block that computes with what it has kept, or gets a hook after tracing, is refused; one that only keeps is not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastrain.errors import ConfigError
from tests.support.pipeline_models import Case, Stack
from tests.support.pipeline_steps import MICRO_BATCHES, alone, chain, in_pipelines

WIDTH = 24


class Keeping(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.work, self.norm, self.how = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), how
        self.register_buffer("average", torch.zeros(WIDTH), persistent=False)
        self.kept: Any = None
        self.again: Any = None
        self.list: list[Tensor] = []
        self.gain = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.kept = 1
            x += 0.5
        y = x + torch.tanh(self.work(x))
        now = x.detach().mean((0, 1))
        match self.how:
            case "an average":
                self.average.mul_(0.9).add_(now, alpha=0.1)
                return y - self.average
            case "an average that is only kept":
                self.average.mul_(0.9).add_(now, alpha=0.1)
            case "an average that begins with the first":
                self.kept = now if self.kept is None else self.kept.lerp(now, 0.5)
                return y - self.kept
            case "the last one":
                before, self.average = self.average, now
                return y - before
            case "a list":
                self.list.append(now)
                return y - self.list[0]
            case "a number":
                self.gain = 0.9 * self.gain + 0.1
                return y * (1 + self.gain)
            case "a mask":
                self.kept = torch.ones(x.shape[1], x.shape[1]).tril() if self.kept is None else self.kept
                return y + self.kept @ x
            case "what others clear":
                self.again = self.work(y) if self.again is None else self.again
                return y + self.again
            case "what it has made":
                self.kept, self.list = y, [now]
            case "random numbers":
                y = torch.dropout(y, 0.3, True)
                self.kept = y.detach()
            case "running statistics":
                self.kept = 1
                return y + self.norm(x.transpose(1, 2)).transpose(1, 2)
        return y


class Model(Stack):
    def __init__(self, how: str, is_checkpointed: bool) -> None:
        super().__init__(WIDTH, 0)
        self.layers = nn.ModuleList(Keeping(how) for _ in range(3))
        self.enter = partial(checkpoint, use_reentrant=False) if is_checkpointed else lambda layer, x: layer(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            layer.again = None
            x = self.enter(layer, x)
        logits: Tensor = self.head(x)
        return logits


def _found(how: str, is_checkpointed: bool, members: tuple[str, ...]) -> Any:
    case = Case(lambda: Model(how, is_checkpointed), (2, 3))
    if len(members) == 1:
        return alone(case, 1).found
    return in_pipelines(case, chain(members, (2,), MICRO_BATCHES), members, 1).found


@pytest.mark.parametrize(
    "how", ["an average", "an average that begins with the first", "the last one", "a list", "a number"]
)
def test_what_is_kept_from_one_micro_batch_to_the_next_is_refused(how: str) -> None:
    """Members compute different micro-batches, and others after a loss: they would train with other gradients."""
    with pytest.raises(ConfigError, match=r"block 'layers\.[01]' computes with what it has kept of an earlier micro-"):
        _found(how, False, ("a", "b"))


@pytest.mark.parametrize(
    ("how", "is_checkpointed"),
    [
        ("an average that is only kept", False),
        ("random numbers", True),
        *(
            pytest.param(how, is_checkpointed, marks=pytest.mark.slow)
            for how, is_checkpointed in [
                ("a mask", False),
                ("what others clear", False),
                ("what it has made", True),
                ("in place", False),
                ("random numbers", False),
                ("running statistics", False),
            ]
        ),
    ],
)
def test_what_a_block_only_keeps_changes_nothing(how: str, is_checkpointed: bool) -> None:
    assert _found(how, is_checkpointed, ("a", "b")) == _found(how, is_checkpointed, ("a",))


class HookedLater(Stack):
    """Hangs a backward hook on the first block of the second member, once its forward has run before."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3)
        self.has_run = False

    def forward(self, tokens: Tensor) -> Tensor:
        if self.has_run and not self.layers[1]._backward_hooks:
            self.layers[1].register_full_backward_hook(lambda module, given, taken: (given[0] * 2,))
        self.has_run = True
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def test_a_backward_hook_that_a_member_hangs_on_its_first_block_after_tracing_is_refused() -> None:
    """It would act on gradients behind the cut only, and the blocks before it would train without it."""
    with pytest.raises(ConfigError, match=r"block 'layers\.1' has a backward hook that it did not have in the tracing"):
        in_pipelines(Case(HookedLater, (2, 3)), chain(("a", "b"), (2,), MICRO_BATCHES), ("a", "b"), 1)
