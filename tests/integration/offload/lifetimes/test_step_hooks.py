"""Hooks of an optimizer's step run once per step, and see parameters and gradients as those of plain training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from elastrain.offload.lifetimes.within import within
from elastrain.offload.planning.orders import UpdateOrder
from elastrain.offload.planning.plan_search import Policy
from experiments.offload.models import build
from tests.integration.offload.lifetimes.test_within import adamw, limit_of, loss_of, snapshot
from tests.integration.offload.lifetimes.touching import SHAPE

pytestmark = pytest.mark.usefixtures("small_limits", "one_thread")
STEPS = 5
Seen = list[Tensor]
Hook = Callable[[Optimizer, Seen], None]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def reads(optimizer: Optimizer, seen: Seen) -> None:
    for each in parameters_of(optimizer):
        seen += [each.detach().clone(), torch.zeros(0) if each.grad is None else each.grad.clone()]


def changes_gradients(optimizer: Optimizer, seen: Seen) -> None:
    for number, each in enumerate(parameters_of(optimizer)):
        if number % 3 == 0:
            each.grad = None
        elif number % 3 == 1 and each.grad is not None:
            each.grad.clamp_(-1e-4, 1e-4)
        elif each.grad is not None:
            each.grad = each.grad.sign()


def changes_options(optimizer: Optimizer, seen: Seen) -> None:
    optimizer.param_groups[0]["lr"] = 1e-4 * (1 + len(seen))
    seen.append(torch.zeros(0))


def changes_parameters(optimizer: Optimizer, seen: Seen) -> None:
    with torch.no_grad():
        for each in parameters_of(optimizer):
            each.clamp_(-0.05, 0.05)


HOOKS: list[tuple[str, Hook]] = [
    ("pre", reads),
    ("post", reads),
    ("pre", changes_gradients),
    ("pre", changes_options),
    ("pre", changes_parameters),
    ("post", changes_parameters),
]


def train(when: str, hook: Hook, folder: Path | None, order: UpdateOrder) -> Seen:
    model, seen = build("gpt", SHAPE)[0], Seen()
    optimizer = adamw(model)

    def call(found: Optimizer, *_: Any) -> None:
        hook(found, seen)

    getattr(optimizer, f"register_step_{when}_hook")(call)
    if folder is None:
        training = None
    else:
        policy = Policy(orders=(order,))
        training = within(model, optimizer, dirs=[str(folder)], memory_limit=limit_of(model, 0.25), policy=policy)
    for step in range(STEPS):
        loss_of(model, step).backward()
        if training is not None:
            training.step(max_grad_norm=0.1)
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    if training is not None:
        training.close()
    return [*seen, *snapshot(model, optimizer)]


@pytest.mark.parametrize("order", UpdateOrder)
@pytest.mark.parametrize(("when", "hook"), HOOKS, ids=lambda each: each if isinstance(each, str) else each.__name__)
def test_a_hook_of_the_step_sees_and_changes_what_it_does_in_plain_training(
    when: str, hook: Hook, order: UpdateOrder, tmp_path: Path
) -> None:
    ours, plain = train(when, hook, tmp_path, order), train(when, hook, None, order)
    assert len(ours) == len(plain)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, plain, strict=True))


def test_hooks_of_all_optimizers_run_once_per_step_and_not_for_a_skipped_one(tmp_path: Path) -> None:
    model, called = build("gpt", SHAPE)[0], list[Optimizer]()
    optimizer = adamw(model)
    training = within(model, optimizer, dirs=[str(tmp_path)], memory_limit=limit_of(model, 0.5))
    handle = register_optimizer_step_post_hook(lambda found, *_: called.append(found))
    try:
        for step in range(3):
            (loss_of(model, step) * (float("inf") if step == 1 else 1.0)).backward()  # type: ignore[no-untyped-call]
            training.step(only_finite=True)
    finally:
        handle.remove()
        training.close()
    assert called == [optimizer] * 2


def test_a_scheduler_sees_that_the_optimizer_was_called(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    model = build("gpt", SHAPE)[0]
    optimizer = adamw(model)
    training = within(model, optimizer, dirs=[str(tmp_path)], memory_limit=limit_of(model, 0.5))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loss_of(model, 0).backward()
    training.step()
    schedule.step()
    training.close()
    assert not [each for each in recwarn if "lr_scheduler" in str(each.message)]
