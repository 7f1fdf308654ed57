"""What a program does to gradients and graphs between backward, step and the next forward is as in plain training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.lifetimes.within import within
from elastrain.offload.planning.orders import UpdateOrder
from elastrain.offload.planning.plan_search import Policy
from experiments.offload.models import build
from tests.integration.offload.lifetimes.test_within import adamw, limit_of, loss_of, snapshot
from tests.integration.offload.lifetimes.touching import SHAPE

pytestmark = pytest.mark.usefixtures("small_limits", "one_thread")
STEPS = 5
Seen = list[Tensor]
Body = Callable[[nn.Module, int, Callable[[], None], Seen], None]


def of_a_kind(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Parameters of one shape."""
    found: dict[Any, list[Tensor]] = {}
    for each in parameters:
        found.setdefault(each.shape, []).append(each)
    return list(found.values())


def backward(model: nn.Module, step: int) -> None:
    loss_of(model, step).backward()  # type: ignore[no-untyped-call]


def given_before_the_forward(model: nn.Module, step: int, end: Callable[[], None], seen: Seen) -> None:
    for number, each in enumerate(model.parameters()):
        if number % 2 == step % 2:
            each.grad = torch.full_like(each, 1e-3 * (number + 1))
    backward(model, step)
    end()


def given_in_one_buffer(model: nn.Module, step: int, end: Callable[[], None], seen: Seen) -> None:
    """Which the program changes as a whole, as where it is summed over workers."""
    flat, at = torch.zeros(sum(each.numel() for each in model.parameters())), 0
    for each in model.parameters():
        each.grad = flat[at : at + each.numel()].view_as(each)
        at += each.numel()
    for part in range(2):
        backward(model, 2 * step + part)
    flat.mul_(0.5)
    end()


def exchanged(model: nn.Module, step: int, end: Callable[[], None], seen: Seen) -> None:
    for part in range(2):
        backward(model, 2 * step + part)
        for several in of_a_kind(list(model.parameters())):
            grads = [each.grad for each in several]
            for each, grad in zip(several, grads[1:] + grads[:1], strict=True):
                each.grad = grad
    end()


def by_tasks(model: nn.Module, step: int, end: Callable[[], None], seen: Seen) -> None:
    """Gradients of two losses, one of which gives way to the other."""
    kept = []
    for part in range(2):
        backward(model, 2 * step + part)
        kept.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
        model.zero_grad()
    for each, a, b in zip(model.parameters(), *kept, strict=True):
        dot = (a * b).sum()
        each.grad = a + b - (dot / b.square().sum().clamp(min=1e-9)) * b if dot < 0 else a + b
    end()


def noisy_and_some_forgotten(model: nn.Module, step: int, end: Callable[[], None], seen: Seen) -> None:
    backward(model, step)
    for number, each in enumerate(model.parameters()):
        if each.grad is not None:
            each.grad.add_(torch.full_like(each.grad, 1e-4))
        if number % 4 == step % 4:
            each.grad = None
    backward(model, step + 100)
    end()
    model.zero_grad(set_to_none=False)


def a_graph_of_before(model: nn.Module, step: int, end: Callable[[], None], seen: Seen) -> None:
    """One that has saved no weight counts for the next step."""
    several = [each for each in model.parameters() if each.ndim == 1][::3]
    backward(model, step)
    late = sum(each.sum() for each in several)
    end()
    late.backward()  # type: ignore[union-attr]
    seen += [each.grad.clone() for each in several if each.grad is not None]


def a_graph_that_has_saved_weights(model: nn.Module, step: int, end: Callable[[], None], seen: Seen) -> None:
    backward(model, step)
    late = loss_of(model, step) if step % 2 else sum(each.square().sum() for each in model.parameters())
    end()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
        late.backward()  # type: ignore[union-attr]
    model.zero_grad()


def a_penalty_before_the_forward(model: nn.Module, step: int, end: Callable[[], None], seen: Seen) -> None:
    """Of weights whose update is due, it may be."""
    penalty = sum(each.square().sum() for each in model.parameters())
    (loss_of(model, step) + 1e-3 * penalty).backward()  # type: ignore[no-untyped-call]
    end()


BODIES: list[Body] = [
    given_before_the_forward,
    given_in_one_buffer,
    exchanged,
    by_tasks,
    noisy_and_some_forgotten,
    a_graph_of_before,
    a_graph_that_has_saved_weights,
    a_penalty_before_the_forward,
]


def train(body: Body, folder: Path | None, order: UpdateOrder) -> Seen:
    model, seen = build("gpt", SHAPE)[0], Seen()
    optimizer = adamw(model)
    training = None
    if folder is not None:
        limit_bytes, policy = limit_of(model, 0.3), Policy(orders=(order,))
        training = within(model, optimizer, dirs=[str(folder)], memory_limit=limit_bytes, policy=policy)

    def end() -> None:
        if training is not None:
            training.step(max_grad_norm=0.1)
            return
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    for step in range(STEPS):
        body(model, step, end, seen)
    if training is not None:
        training.close()
    return [*seen, *snapshot(model, optimizer)]


@pytest.mark.parametrize("order", UpdateOrder)
@pytest.mark.parametrize("body", BODIES, ids=lambda each: each.__name__)
def test_gradients_are_as_in_plain_training(body: Body, order: UpdateOrder, tmp_path: Path) -> None:
    ours, plain = train(body, tmp_path, order), train(body, None, order)
    assert len(ours) == len(plain)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, plain, strict=True))


def test_one_tensor_as_the_gradient_of_two_parameters_is_refused_where_it_would_be_clipped(tmp_path: Path) -> None:
    """Plain training scales it once for each of them."""
    model = build("gpt", SHAPE)[0]
    training = within(model, adamw(model), dirs=[str(tmp_path)], memory_limit=limit_of(model, 0.3))
    try:
        backward(model, 0)
        one, other = next(several for several in of_a_kind(list(model.parameters())) if len(several) > 1)[:2]
        one.grad = other.grad
        with pytest.raises(OffloadConfigError, match="is the gradient of several parameters"):
            training.step(max_grad_norm=1.0)
        one.grad = one.grad.clone()  # the way out that the sentence names
        training.step(max_grad_norm=1.0)
    finally:
        training.close()
