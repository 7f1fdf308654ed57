"""Backwards in two parts: the bits of whole backwards, and backwards that stay whole where two parts would not do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastrain.errors import ConfigError
from elastrain.pipeline.actions import ActionKind
from elastrain.pipeline.pipeline_plan import Pipeline, PipelinePlan
from elastrain.pipeline.stubs.uses import allowed_gradients
from elastrain.runtime.loop import split_backward, task_backward
from elastrain.runtime.loop.split_backward import HookWatch, backward_of_input, backward_of_weights
from tests.support.pipeline_models import CASES, WORDS, Case, Layer, Stack, loss_of
from tests.support.pipeline_steps import MICRO_BATCHES, Post, alone, chain, in_pipelines

SLOW = pytest.mark.slow
MEMBERS = ("a", "b", "c")


def _both(case: Case, run_length: int) -> Post:
    """Compare pipelines with a job of one."""
    runs = -(-MICRO_BATCHES // run_length)
    found = in_pipelines(case, chain(MEMBERS, case.cuts, runs), MEMBERS, run_length)
    assert found.found == alone(case, run_length).found
    return found


def _weights(found: Post) -> dict[str, int]:
    kinds = [member for member, kind, _, _ in found.order if kind == "weight"]
    return {member: kinds.count(member) for member in MEMBERS}


SPLIT = ("frozen", "bfloat16", "autocast", "autocast-loop", "transposed", "in-place")


@pytest.mark.parametrize("run_length", [1, pytest.param(2, marks=SLOW), pytest.param(5, marks=SLOW)])
@pytest.mark.parametrize("case", ["gpt", *(pytest.param(each, marks=SLOW) for each in SPLIT)])
def test_two_parts_have_the_bits_of_a_whole_backward(case: str, run_length: int) -> None:
    found = _both(CASES[case], run_length)
    assert _weights(found) == {"a": 0, "b": MICRO_BATCHES, "c": MICRO_BATCHES}, "the first task has no input gradient"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["encoder-decoder", "positions", "passing-by", "drawing", "written"])
def test_whatever_can_be_split_the_bits_are_those_of_a_job_of_one(case: str) -> None:
    _both(CASES[case], 2)


class Convolved(nn.Module):
    """Convolutions with batch norm and dropout, of which the first has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(8, 8, 3, padding=1, bias=place > 1), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.2)
            )
            for place in range(4)
        )
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.transpose(1, 2))
        return logits


class HalfFrozen(Stack):
    """Some weights get no gradient, one is not used, and one is used outside of modules."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up.bias.requires_grad_(False)  # type: ignore[operator, union-attr]  # torch: a module
            layer.unused = nn.Parameter(torch.ones(3))
            layer.gain = nn.Parameter(torch.ones(24))
            layer.register_forward_hook(lambda module, _, out: out * module.gain.exp())


class Scaled(Stack):
    """Hooks on parameters change their gradients."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.down.weight.register_hook(lambda gradient: gradient * 3.0)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("run_length", [1, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize(
    "build", [Convolved, HalfFrozen, pytest.param(Scaled, marks=SLOW), partial(Stack, mixing=True)]
)
def test_models_of_all_kinds_are_split(build: Callable[[], nn.Module], run_length: int) -> None:
    found = _both(Case(build, (2, 4)), run_length)
    assert _weights(found) == {"a": 0, "b": MICRO_BATCHES, "c": MICRO_BATCHES}


class _Multiply(torch.autograd.Function):
    """A function of a weight, which must run once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).sum((0, 1))


class OwnFunction(Layer):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gain = nn.Parameter(torch.full((width,), 1.5))

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(_Multiply.apply(x, self.gain))  # type: ignore[no-untyped-call]  # of torch


class Twice(Layer):
    """Enters itself twice."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(super().forward(x))


class Inside(Layer):
    """Checkpoints a part of itself."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        up: Tensor = checkpoint(self.up, self.norm(x), use_reentrant=False)
        return x + self.dropout(self.down(up))


class Hooked(Layer):
    """Doubles a gradient on its way."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        normed.register_hook(lambda gradient: gradient * 2.0)
        return x + self.dropout(self.down(self.up(normed)))


class OnTheHost(Layer):
    """Keeps what it saves elsewhere."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


class Told(Layer):
    """Is told of its backward."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm.register_full_backward_hook(lambda module, into, out: (into[0] * 2.0,))


class OfLayers(nn.Module):
    def __init__(self, layer: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 24)
        self.layers = nn.ModuleList(layer(24) for _ in range(4))
        self.head = nn.Linear(24, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize(
    "layer", [OwnFunction, Twice, Inside, Hooked, *(pytest.param(each, marks=SLOW) for each in (OnTheHost, Told))]
)
def test_what_cannot_be_split_is_computed_whole(layer: Callable[[int], nn.Module]) -> None:
    found = _both(Case(lambda: OfLayers(layer), (2, 4)), 3)
    assert _weights(found)["b"] == 0


@pytest.mark.slow
def test_a_tied_weight_of_two_later_blocks_on_one_member_is_computed_whole() -> None:
    def build() -> nn.Module:
        model = OfLayers(Layer)
        model.layers[2].up.weight = model.layers[3].up.weight  # type: ignore[union-attr]  # torch: a module
        return model

    found = _both(Case(build, (2, 5)), 2)
    assert _weights(found) == {"a": 0, "b": 0, "c": MICRO_BATCHES}
    # On two members each of them has its own part of the gradient.
    found = _both(Case(build, (2, 4)), 2)
    assert _weights(found) == {"a": 0, "b": MICRO_BATCHES, "c": MICRO_BATCHES}


def _at_leisure(blocks: int) -> PipelinePlan:
    """Limits that let weight gradients wait for the last backward."""
    most = (MICRO_BATCHES,) * 3
    return PipelinePlan(blocks=blocks, pipelines=(Pipeline(members=MEMBERS, cuts=(2, 4), share=1, limits=most),))


def test_a_whole_backward_comes_behind_the_weight_gradients_of_earlier_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, calls, behind = Case(lambda: OfLayers(Layer), (2, 4)), threading.local(), list[int]()
    add_left = task_backward.ActionBackward._add_left

    def sometimes(ends: Any) -> Any:
        calls.made = getattr(calls, "made", 0) + 1
        return None if calls.made == 3 else backward_of_input(ends)

    def counted(backward: Any) -> None:
        before = len(backward._pipelines.left)
        add_left(backward)
        behind.append(before - len(backward._pipelines.left))

    monkeypatch.setattr(task_backward, "backward_of_input", sometimes)
    monkeypatch.setattr(task_backward.ActionBackward, "_add_left", counted)
    expected = alone(case, MICRO_BATCHES).found
    assert in_pipelines(case, _at_leisure, MEMBERS, MICRO_BATCHES).found == expected
    assert max(behind) > 1

    def forgetting(backward: Any) -> None:
        if backward._action.kind is ActionKind.WEIGHT:
            add_left(backward)

    calls = threading.local()
    monkeypatch.setattr(task_backward.ActionBackward, "_add_left", forgetting)
    # The desk, which has counted them, a slot that was not begun, or another digest.
    with contextlib.suppress(AssertionError, ConfigError):
        assert in_pipelines(case, _at_leisure, MEMBERS, MICRO_BATCHES).found == expected
        pytest.fail("they may come in any order")


def test_without_the_watch_a_hook_on_an_activation_acts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HookWatch, "__enter__", lambda watch: watch)
    with pytest.raises(AssertionError):
        _both(Case(lambda: OfLayers(Hooked), (2, 4)), 3)


def test_without_the_look_at_shared_weights_they_get_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = split_backward._weights
    monkeypatch.setattr(split_backward, "_weights", lambda node, beside, owners: weights(node, beside, {}))
    with pytest.raises((AssertionError, RuntimeError)):
        _both(Case(lambda: OfLayers(Twice), (2, 4)), 3)


@allowed_gradients()
def test_saved_tensors_go_as_their_weights_are_computed() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    received = torch.randn(3, 4).requires_grad_()
    entered = split_backward.ReceivedCopy.apply(received, {}, 0)  # type: ignore[no-untyped-call]  # of torch
    left = backward_of_input([(second(first(entered).relu()).sum(), None)])
    assert left is not None
    assert [part.node.name() for part in left] == ["AddmmBackward0", "AddmmBackward0"]
    assert first.weight.grad is None
    node = left[0].node
    left.pop(0).compute()
    assert second.weight.grad is not None
    assert first.weight.grad is None
    with pytest.raises(RuntimeError, match="freed"):
        node._saved_mat1  # type: ignore[attr-defined]  # noqa: B018  of torch
    backward_of_weights(left)
    assert first.weight.grad is not None
    assert not left


@allowed_gradients()
def test_a_backward_that_reaches_nothing_received_is_not_split() -> None:
    layer = nn.Linear(4, 4)
    assert backward_of_input([(layer(torch.randn(3, 4)).sum(), None)]) is None
    assert layer.weight.grad is None


def test_the_watch_leaves_torch_as_it_was() -> None:
    before = (
        vars(Tensor)["register_hook"],
        torch.autograd.graph.saved_tensors_hooks.__enter__,
        "retain_grad" in vars(Tensor),
    )
    with HookWatch() as watch:
        torch.ones(2, requires_grad=True).exp().retain_grad()
    assert watch.has_found
    assert before == (
        vars(Tensor)["register_hook"],
        torch.autograd.graph.saved_tensors_hooks.__enter__,
        "retain_grad" in vars(Tensor),
    )
    with HookWatch() as watch:
        loss_of(Stack(), torch.utils.data.default_collate([(torch.ones(5, dtype=torch.long),) * 2]))
    assert not watch.has_found
