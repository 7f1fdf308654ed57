"""Who freezes, thaws or regroups parameters, forgets states, or keeps a graph over a step: as in plain training."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain.offload.errors import ModifiedInPlaceError
from elastrain.offload.lifetimes import within as module
from elastrain.offload.planning.orders import UpdateOrder
from tests.integration.offload.lifetimes.touching import NORM, made, tokens

pytestmark = pytest.mark.usefixtures("small_limits", "one_thread")
STEPS = 6
"""Two show what there is to plan; what changes at the third and fourth meets plans, and is undone again."""
CHANGED = (3, 4)
Program = Callable[[nn.Module, torch.optim.Optimizer, Callable[[], Any], int], None]


def some(model: nn.Module) -> nn.Parameter:
    """One of several parameters of a block."""
    return list(model.parameters())[3]


def freeze_before_a_forward(model: nn.Module, _: torch.optim.Optimizer, step: Callable[[], Any], n: int) -> None:
    some(model).requires_grad_(n not in CHANGED)
    model(tokens(n)).backward()
    step()


def freeze_after_a_backward(model: nn.Module, _: torch.optim.Optimizer, step: Callable[[], Any], n: int) -> None:
    some(model).requires_grad_(True)
    model(tokens(n)).backward()
    some(model).requires_grad_(n not in CHANGED)
    step()


def freeze_a_block(model: nn.Module, _: torch.optim.Optimizer, step: Callable[[], Any], n: int) -> None:
    model.decoder[1].requires_grad_(n not in CHANGED)  # type: ignore[index, operator]
    model(tokens(n)).backward()
    step()


def thaw(model: nn.Module, _: torch.optim.Optimizer, step: Callable[[], Any], n: int) -> None:
    some(model).requires_grad_(n >= CHANGED[0])
    model(tokens(n)).backward()
    step()


def thaw_between_two_backwards(model: nn.Module, _: torch.optim.Optimizer, step: Callable[[], Any], n: int) -> None:
    for micro_batch in (n, n + 1):
        some(model).requires_grad_(n > CHANGED[0] or (n, micro_batch) == (CHANGED[0], CHANGED[0] + 1))
        model(tokens(micro_batch)).backward()
    step()


def forget_states(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any], n: int) -> None:
    model(tokens(n)).backward()
    step()
    if n == CHANGED[0]:
        optimizer.state.clear()


def replace_states(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any], n: int) -> None:
    model(tokens(n)).backward()
    step()
    if n == CHANGED[0]:
        optimizer.state = defaultdict(dict)


def regroup(model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any], n: int) -> None:
    model(tokens(n)).backward()
    step()
    if n == CHANGED[0]:
        kept = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = kept[::2]
        optimizer.add_param_group({"params": kept[1::2], "lr": 1e-4})


def let_the_optimizer_have(optimizer: torch.optim.Optimizer, kept: Callable[[Tensor], bool], model: nn.Module) -> None:
    optimizer.param_groups[0]["params"] = [each for each in model.parameters() if kept(each)]


def add_up_what_the_optimizer_does_not_have(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any], n: int
) -> None:
    let_the_optimizer_have(optimizer, lambda each: each is not some(model), model)
    model(tokens(n)).backward()
    step()


def take_a_block_from_the_optimizer_for_a_while(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any], n: int
) -> None:
    own = set(model.decoder[1].parameters()) if n in CHANGED else set()  # type: ignore[index, union-attr]
    let_the_optimizer_have(optimizer, lambda each: each not in own, model)
    model(tokens(n)).backward()
    step()


def forget_what_the_optimizer_does_not_have(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any], n: int
) -> None:
    add_up_what_the_optimizer_does_not_have(model, optimizer, step, n)
    if n in CHANGED:
        some(model).grad = None


def train_with_two_optimizers(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any], n: int
) -> None:
    other = torch.optim.SGD([some(model)], lr=0.1)
    add_up_what_the_optimizer_does_not_have(model, optimizer, step, n)
    other.step()
    other.zero_grad(set_to_none=n not in CHANGED)


PROGRAMS = [
    freeze_before_a_forward,
    freeze_after_a_backward,
    freeze_a_block,
    thaw,
    thaw_between_two_backwards,
    forget_states,
    replace_states,
    regroup,
    add_up_what_the_optimizer_does_not_have,
    take_a_block_from_the_optimizer_for_a_while,
    forget_what_the_optimizer_does_not_have,
    train_with_two_optimizers,
]


def left(model: nn.Module) -> list[Tensor]:
    """All parameters, and the gradients that are there."""
    own = list(model.parameters())
    return [*own, *(each.grad for each in own if each.grad is not None)]


def in_memory(program: Program, norm: float | None = NORM) -> list[Tensor]:
    model, optimizer, _ = made()

    def step() -> None:
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()

    for n in range(STEPS):
        program(model, optimizer, step, n)
    return left(model)


def limited(program: Program, order: UpdateOrder, folder: Path, norm: float | None = NORM) -> list[Tensor]:
    model, optimizer, limit_bytes = made()
    training = module.within(model, optimizer, dirs=[str(folder)], memory_limit=limit_bytes)

    def step() -> None:
        training._planning.order = order
        training.step(max_grad_norm=norm)

    for n in range(STEPS):
        program(model, optimizer, step, n)
    training.close()
    return left(model)


@pytest.mark.parametrize("order", UpdateOrder)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
def test_what_a_program_changes_comes_out_as_in_plain_training(
    program: Program, order: UpdateOrder, tmp_path: Path
) -> None:
    pairs = zip(limited(program, order, tmp_path), in_memory(program), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


@pytest.mark.parametrize("order", UpdateOrder)
def test_gradients_that_the_optimizer_does_not_have_add_up_unclipped(order: UpdateOrder, tmp_path: Path) -> None:
    program = add_up_what_the_optimizer_does_not_have
    ours, theirs = limited(program, order, tmp_path, None), in_memory(program, None)
    assert len(ours) == 1 + len(list(made()[0].parameters()))
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("order", UpdateOrder)
def test_states_that_are_loaded_come_after_an_update_that_is_due(order: UpdateOrder, tmp_path: Path) -> None:
    def load(
        kept: list[Any], model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any], n: int
    ) -> None:
        model(tokens(n)).backward()
        step()
        if n == CHANGED[0] - 1:
            kept.append(copy.deepcopy(optimizer.state_dict()))
        if n == CHANGED[1]:
            optimizer.load_state_dict(kept.pop())

    pairs = zip(limited(partial(load, []), order, tmp_path), in_memory(partial(load, [])), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


@pytest.mark.parametrize("order", UpdateOrder)
def test_a_graph_from_before_a_step_is_refused_as_in_plain_training(order: UpdateOrder, tmp_path: Path) -> None:
    refused = []

    def both(model: nn.Module, _: torch.optim.Optimizer, step: Callable[[], Any], n: int) -> None:
        loss, other = model(tokens(n)), model(tokens(n + 1))
        loss.backward()
        step()
        with pytest.raises((RuntimeError, ModifiedInPlaceError), match=r"modified by an inplace|changed in place"):
            other.backward()
        refused.append(n)
        model.zero_grad()

    pairs = zip(limited(both, order, tmp_path), in_memory(both), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)
    assert len(refused) == 2 * STEPS
