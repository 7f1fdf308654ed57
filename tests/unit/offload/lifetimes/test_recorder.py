"""The recorder on models with tied weights, views, in-place operators, checkpointing and frozen parameters."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastrain.offload.lifetimes.recorder import StepRecorder
from elastrain.offload.planning.plan_values import Kind
from elastrain.offload.planning.step_recording import RecordedStorage, Recording
from elastrain.offload.report.show import active_fraction, bytes_of, held_bytes
from experiments.offload.models import KINDS, Shape, build

SHAPE = Shape(width=32, layers=2, tokens=8, batch=2, vocabulary=64)
BIG = 1024
"""Bytes: below it there are losses, norms and counters."""


def recorded(model: nn.Module, loss_of: Callable[[], Tensor], steps_before: int = 1) -> Recording:
    """One step of AdamW with clipping, after one that has made the optimizer's states."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(recorder: StepRecorder | None = None) -> None:
        loss = loss_of()
        if recorder is not None:
            recorder.scope = "after forward"
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(steps_before):
        step()
    gc.collect()
    with StepRecorder(model, optimizer) as recorder:
        step(recorder)
    return recorder.recording()


def of(recording: Recording, kind: Kind) -> list[RecordedStorage]:
    return [each for each in recording.storages if each.kind is kind and each.size_bytes >= BIG]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_gradients_and_states_are_told_apart(kind: str) -> None:
    model, tokens = build(kind, SHAPE)
    found = recorded(model, lambda: model(tokens))
    size_bytes = sum(each.nbytes for each in model.parameters())
    assert bytes_of(found, Kind.PARAMETER) == size_bytes
    assert bytes_of(found, Kind.GRADIENT) == size_bytes
    counters = sum(each.size_bytes for each in found.storages if each.name.endswith(": step"))
    assert bytes_of(found, Kind.STATE) - counters == 2 * size_bytes
    assert 0 < active_fraction(found) < 0.5
    assert max(held_bytes(found)) >= 4 * size_bytes


def test_uses_lie_in_order_and_within_each_life() -> None:
    model, tokens = build("gpt", SHAPE)
    found = recorded(model, lambda: model(tokens))
    for each in found.storages:
        assert list(each.uses) == sorted(set(each.uses)) and set(each.changes) <= set(each.uses)
        if each.born is not None and each.uses:
            assert each.uses[0] == each.born == each.changes[0]
        if each.died is not None and each.uses:
            assert each.uses[-1] < each.died
    assert all(operator.seconds >= 0 for operator in found.operators)
    assert {operator.scope for operator in found.operators} == {"", "after forward"}


def test_parameters_and_states_are_changed_by_the_update_alone() -> None:
    model, tokens = build("gpt", SHAPE)
    found = recorded(model, lambda: model(tokens))
    last_backward = max(number for number, each in enumerate(found.operators) if each.backward)
    for each in of(found, Kind.PARAMETER) + of(found, Kind.STATE):
        assert each.born is None and each.died is None
        assert each.changes and min(each.changes) > last_backward
    for each in of(found, Kind.GRADIENT):
        assert each.born is not None and found.operators[each.born].backward and each.died is not None


def test_what_the_forward_saves_is_an_activation_and_is_freed_in_the_backward() -> None:
    model, tokens = build("gpt", SHAPE)
    found = recorded(model, lambda: model(tokens))
    saved = of(found, Kind.ACTIVATION)
    assert len(saved) > 10
    for each in saved:
        if each.born is not None:
            assert not found.operators[each.born].backward
            assert each.died is not None and found.operators[each.uses[-1]].backward


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), tokens.flatten())


def test_tied_weights_are_one_storage_with_the_uses_of_both() -> None:
    torch.manual_seed(0)
    model, tokens = Tied(), torch.randint(0, 64, (2, 8))
    found = recorded(model, lambda: model(tokens))
    (weight,) = of(found, Kind.PARAMETER)
    assert weight.name == "embed.weight"
    forward = [use for use in weight.uses if not found.operators[use].backward and use not in weight.changes]
    assert len(forward) >= 2
    assert len(of(found, Kind.GRADIENT)) == 1


def test_views_and_in_place_operators_count_for_the_storage_below() -> None:
    layer = nn.Linear(32, 32)

    def loss() -> Tensor:
        hidden = layer(torch.ones(16, 32))
        view = hidden.t()[3:5]
        hidden = hidden.relu_()
        return hidden.sum() + view.detach().sum() * 0

    found = recorded(layer, loss)
    relu = next(number for number, each in enumerate(found.operators) if "relu_" in each.name)
    (hidden,) = [each for each in found.storages if relu in each.changes]
    assert hidden.born is not None and hidden.born < relu
    assert hidden.size_bytes == 16 * 32 * 4
    views = {
        number for number, each in enumerate(found.operators) if each.name in ("aten.t.default", "aten.slice.Tensor")
    }
    assert views and not views & set(hidden.uses)


def test_a_checkpointed_block_keeps_its_input_alone() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
    first = nn.Linear(32, 32)
    model, x = nn.ModuleList([first, block]), torch.randn(16, 32)
    plain = recorded(model, lambda: block(first(x)).sum())
    again = recorded(model, lambda: checkpoint(block, first(x), use_reentrant=False).sum())
    inside = [each.size_bytes for each in of(again, Kind.ACTIVATION)]
    assert sum(inside) < sum(each.size_bytes for each in of(plain, Kind.ACTIVATION))
    assert 16 * 128 * 4 not in inside, "what is computed again was born in the backward: it is temporary"
    assert any(each.size_bytes == 16 * 128 * 4 for each in of(again, Kind.TEMPORARY))


def test_frozen_parameters_are_parameters_that_nothing_changes() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(16, 32)
    model[0].requires_grad_(False)
    found = recorded(model, lambda: model(x).sum())
    frozen = [each for each in of(found, Kind.PARAMETER) if each.name.startswith("0.")]
    assert frozen and not any(each.changes for each in frozen)
    assert {each.name for each in of(found, Kind.GRADIENT)} == {"1.weight"}


def test_running_statistics_are_changed_although_no_schema_says_so() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 512), nn.BatchNorm1d(512)), torch.randn(16, 32)
    found = recorded(model, lambda: model(x).sum())
    norm = next(number for number, each in enumerate(found.operators) if "batch_norm" in each.name)
    changed = [each for each in found.storages if norm in each.changes and each.born is None]
    assert len(changed) == 2


def test_gradients_of_several_backwards_are_added_in_one_storage() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(32, 32), torch.randn(16, 32)

    def twice() -> Tensor:
        model(x).sum().backward()
        return model(2 * x).sum()

    found = recorded(model, twice)
    (weight,) = of(found, Kind.GRADIENT)
    assert weight.name == "weight" and len(weight.changes) >= 2


def test_recording_changes_no_bit_and_keeps_nothing_alive() -> None:
    def run(*, record: bool) -> list[Tensor]:
        model, tokens = build("bert", SHAPE)
        torch.manual_seed(1)
        if record:
            recorded(model, lambda: model(tokens), steps_before=0)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            model(tokens).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return [each.detach().clone() for each in model.parameters()]

    assert all(torch.equal(*pair) for pair in zip(run(record=True), run(record=False), strict=True))
    model, x = nn.Linear(32, 32), torch.randn(16, 32)
    found = recorded(model, lambda: model(x).sum())
    assert all(each.died is not None for each in of(found, Kind.TEMPORARY) if each.born is not None)
