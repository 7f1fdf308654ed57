"""What a block writes, keeps or reads is used by code behind it, which another member runs without that block."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.naming import blocks_of
from elastrain.pipeline.stubs.origins import Origins
from elastrain.pipeline.stubs.trace import TracedModel
from elastrain.runtime.loop.step import Step
from tests.support.pipeline_models import Case, Layer, Stack, batch_of, loss_of
from tests.support.pipeline_steps import MICRO_BATCHES, alone, chain, in_pipelines
from tests.support.traced import trace

WIDTH = 24
EVERYWHERE = (1, 2, 3, 4, 5)


def _doubled(gradient: Any) -> Any:
    return gradient * 2.0


class Odd(nn.Module):
    """A layer that leaves a measure of what it makes somewhere else than in what it returns."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(WIDTH, WIDTH), how
        self.measured: Any = torch.zeros(())
        if "buffer" in how:
            del self.measured
            self.register_buffer("measured", torch.zeros(()), persistent=False)
        elif "number" in how:
            self.measured = [0.0] if "list" in how else 0.0

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        made = torch.tanh(self.inner(x * (mask.contiguous() if "mask" in self.how else mask)))
        measured = made.detach().square().mean()
        match self.how:
            case "a new buffer":
                self.measured = measured
            case "a buffer" | "a tensor":
                self.measured.copy_(measured)
            case "a number":
                self.measured = measured.item()
            case "a number in a list":
                self.measured[0] = measured.item()
            case "a number that it returns":
                return x + made, measured.item()
            case "a hook on what it is given":
                x.register_hook(_doubled)  # type: ignore[no-untyped-call]  # of torch
            case "a hook on its own":
                made.register_hook(_doubled)  # type: ignore[no-untyped-call]  # of torch
        return x + made


class Model(Stack):
    """The second layer is odd; code at the end uses what it has left."""

    def __init__(self, how: str, use: str = "at the end") -> None:
        super().__init__(WIDTH)
        self.layers = nn.ModuleList(Odd(how if place == 1 else "") for place in range(4))
        self.how, self.use = how, use
        if how == "a hook of the module":
            self.layers[1].register_full_backward_hook(lambda module, into, out: tuple(map(_doubled, into)))

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask, factor = self.embed(tokens), torch.ones(WIDTH), 1.0
        for layer in self.layers:
            found = layer(x, mask)
            x, measured = found if isinstance(found, tuple) else (found, layer.measured)
            if self.how and measured is not None and layer is self.layers[1]:
                kept = measured[0] if isinstance(measured, list) else measured
        if self.use == "read at the end":
            factor += kept.item()
        elif self.use == "at the end":
            factor += kept
        logits: Tensor = self.head(x * factor * mask)
        return logits


def traced(model: nn.Module) -> TracedModel:
    return trace(model, blocks_of(model), lambda: loss_of(model, batch_of(0)))


@pytest.mark.parametrize(
    ("how", "use", "cuts"),
    [
        ("a mask that it is given", "nowhere", EVERYWHERE),
        ("a buffer", "nowhere", EVERYWHERE),
        ("a buffer", "at the end", (1, 2, 5)),
        ("a buffer", "read at the end", (1, 2)),
        ("a new buffer", "at the end", (1, 2, 5)),
        ("a tensor", "nowhere", EVERYWHERE),
        ("a tensor", "at the end", (1, 2, 5)),
        ("a tensor", "read at the end", (1, 2)),
        ("a number", "at the end", (1, 2)),
        ("a number in a list", "at the end", (1, 2)),
        ("a number that it returns", "at the end", (1, 2)),
        ("a hook on what it is given", "nowhere", (1, 3, 4, 5)),
        ("a hook of the module", "nowhere", (1, 3, 4, 5)),
        ("a hook on its own", "nowhere", EVERYWHERE),
    ],
)
def test_what_a_block_leaves_beside_what_it_returns_lives_with_it(how: str, use: str, cuts: tuple[int, ...]) -> None:
    """On other members it is what it was, and nobody would notice: they would train with other gradients."""
    graph = traced(Model(how, use)).graph
    assert graph.legal_cuts == cuts, [each.why for each in graph.illegal]


@pytest.mark.parametrize("how", ["a buffer", "a number that it returns", "a hook on what it is given"])
def test_over_legal_cuts_it_has_the_bits_of_one(how: str) -> None:
    case = Case(lambda: Model(how, "nowhere" if "hook" in how else "at the end"), (1, 2))
    cut = 3 if "hook" in how else 2
    found = in_pipelines(case, chain(("a", "b"), (cut,), MICRO_BATCHES), ("a", "b"), 1).found
    assert found == alone(case, 1).found


class Sharing(Layer):
    """What the first layer makes in a forward lies in a box, from which the others take it."""

    def __init__(self, box: dict[str, Tensor], how: str) -> None:
        super().__init__(WIDTH)
        self.box, self.how = box, how

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        if self.how == "a view changed in place" and positions is not None:
            with torch.no_grad():
                positions.mul_(0.5)
            return super().forward(x)
        made = super().forward(x)
        if "it" not in self.box:
            match self.how:
                case "activations":
                    self.box["it"] = made.mean((0, 1)) * 0.5
                case "a mask that is drawn":
                    self.box["it"] = torch.bernoulli(torch.full((WIDTH,), 0.5))
                case _:
                    self.box["it"] = torch.linspace(0.5, 1.5, WIDTH)
        return made * self.box["it"]


class Box(Stack):
    def __init__(self, how: str) -> None:
        super().__init__(WIDTH)
        self.box: dict[str, Tensor] = {}
        self.layers = nn.ModuleList(Sharing(self.box, how) for _ in range(4))
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        self.box.clear()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(
                x, x.detach()[:, :4] if self.how == "a view changed in place" and layer is self.layers[1] else None
            )
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize(
    ("how", "cuts"),
    [
        ("activations", (1, 5)),
        ("a mask that is drawn", (1, 5)),
        ("a constant", EVERYWHERE),
        ("a view changed in place", (1, 3, 4, 5)),
    ],
)
def test_what_a_block_makes_and_another_one_finds_keeps_them_together(how: str, cuts: tuple[int, ...]) -> None:
    """Where it can be made again from nothing, each member makes its own."""
    graph = traced(Box(how)).graph
    assert graph.legal_cuts == cuts, [each.why for each in graph.illegal]


def test_where_blocks_find_what_nobody_has_made_here_the_bits_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule broken."""
    monkeypatch.setattr(Origins, "made_inside", lambda *_, **__: None)
    case = Case(lambda: Box("activations"), (3, 4))
    assert in_pipelines(case, chain(("a", "b"), (3,), MICRO_BATCHES), ("a", "b"), 1).found != alone(case, 1).found


class Slope(Stack):
    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        (slope,) = torch.autograd.grad(x.sum(), first, create_graph=True, allow_unused=True)
        logits: Tensor = self.head(x if slope is None else x + slope)
        return logits


def test_gradients_that_code_between_blocks_takes_through_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"code between blocks takes gradients of activations .* in a block"):
        traced(Slope())


class SlopeInside(Stack):
    """Its layers take gradients themselves, of a leaf of their own."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(leaf).square().sum(), leaf, create_graph=True)
            return x - 0.1 * slope

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.layers = nn.ModuleList(SlopeInside.Layer() for _ in range(4))


def test_gradients_that_a_block_takes_itself_are_its_own() -> None:
    case = Case(SlopeInside, (3, 4))
    assert in_pipelines(case, chain(("a", "b"), (3,), MICRO_BATCHES), ("a", "b"), 1).found == alone(case, 1).found


class Hooking(Stack):
    """Hangs up a hook in its first forward, and knows that by an attribute."""

    has_hook = False

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.has_hook:
            self.layers[1].register_forward_hook(lambda module, args, made: made * 1.5)
            self.has_hook = True
        return super().forward(tokens)


def test_a_hook_that_the_first_forward_hangs_up_is_there_once() -> None:
    case = Case(Hooking, (3, 4))
    assert in_pipelines(case, chain(("a", "b"), (3,), MICRO_BATCHES), ("a", "b"), 1).found == alone(case, 1).found


@pytest.mark.parametrize("stays", [True, False])
def test_a_hook_that_the_body_of_a_loop_leaves_is_refused(stays: bool) -> None:
    """It would be there once too often where each body registers one, and not at all where only the first does."""
    model = Stack()

    def body() -> None:
        hook = model.layers[1].register_forward_hook(lambda module, args, made: made * 1.5)
        loss_of(model, batch_of(0))
        if not stays:
            hook.remove()

    if stays:
        with pytest.raises(ConfigError, match=r"body of the loop registers a hook on 'layers.1'.* before the loop"):
            trace(model, blocks_of(model), body)
    else:
        assert trace(model, blocks_of(model), body).graph.legal_cuts == EVERYWHERE


def _added_up(how: str, case: Case, model: nn.Module, step: Step) -> None:
    total = torch.zeros(())
    for batch in step:
        loss = loss_of(model, batch)
        if how == "a loss made in place":
            made = torch.zeros(())
            made += loss
            loss = made.add_(loss, alpha=0.5)
        elif how == "before backward":
            total += loss.detach()
        elif how == "into a view":
            total.view(1)[0].add_(loss.detach())
        step.backward(loss, weight=batch[0].numel())
        if how == "behind backward":
            total += loss.detach()
        elif how == "by out":
            torch.add(total, loss.detach(), out=total)


@pytest.mark.parametrize("how", ["before backward", "behind backward", "into a view", "by out"])
def test_losses_that_the_loop_adds_up_where_they_are_not_are_refused(how: str) -> None:
    """The sum would be nothing there, and a loop that ends by it would end elsewhere than others."""
    case = Case(Stack, (3, 4))
    with pytest.raises(ConfigError, match=r"add.* keeps values that are not on this member.* read step\.loss"):
        in_pipelines(case, chain(("a", "b"), (3,), MICRO_BATCHES), ("a", "b"), 1, loop=partial(_added_up, how))


def test_a_loss_may_be_made_in_place_in_each_micro_batch() -> None:
    case, found = Case(Stack, (3, 4)), []
    for members in (("a",), ("a", "b")):
        cuts = (3,)[: len(members) - 1]
        loop = partial(_added_up, "a loss made in place")
        found.append(in_pipelines(case, chain(members, cuts, MICRO_BATCHES), members, 1, loop=loop).found)
    assert found[0] == found[1]
