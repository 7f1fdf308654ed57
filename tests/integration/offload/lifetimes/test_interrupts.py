"""Whatever ends a forward or a backward, and wherever: the micro-batch can be computed again, with the same bits."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastrain.offload.lifetimes.moving import PieceMover
from elastrain.offload.lifetimes.piece_store import PieceStore
from elastrain.offload.lifetimes.saved import SavedTensors
from elastrain.offload.lifetimes.within import within
from elastrain.offload.planning.orders import UpdateOrder
from elastrain.offload.planning.plan_search import Policy
from experiments.offload.models import build
from tests.integration.offload.lifetimes.test_again import all_again
from tests.integration.offload.lifetimes.test_within import adamw, assert_same, limit_of, loss_of, plain, snapshot
from tests.integration.offload.lifetimes.touching import SHAPE

pytestmark = pytest.mark.usefixtures("small_limits", "one_thread")
STEPS = 5
NUMBER = signal.SIGUSR1
POLICIES = {
    "after": Policy(orders=(UpdateOrder.AFTER_BACKWARD,)),
    "before": Policy(orders=(UpdateOrder.BEFORE_FORWARD,)),
    "again": Policy(make=all_again, improve=lambda plan, _: plan),
}


def stops(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def stopped_by_a_signal() -> Iterator[None]:
    before = signal.signal(NUMBER, stops)
    yield
    signal.signal(NUMBER, before)


def train(folder: Path, policy: Policy, begin: Callable[[nn.Module], None]) -> tuple[list[Tensor], int]:
    """Parameters and states after some steps, and how often a micro-batch was computed again."""
    model, stopped = build("gpt", SHAPE)[0], 0
    optimizer = adamw(model)
    training = within(model, optimizer, dirs=[str(folder)], memory_limit=limit_of(model, 0.3), policy=policy)
    begin(model)
    torch.manual_seed(7)
    for step in range(STEPS):
        for _ in range(50):
            try:
                loss_of(model, step).backward()  # type: ignore[no-untyped-call]
                break
            except (KeyboardInterrupt, RuntimeError):
                stopped += 1
                model.zero_grad()
        else:
            raise AssertionError("the micro-batch does not come to its end")
        training.step(max_grad_norm=1.0)
    training.close()
    return snapshot(model, optimizer), stopped


CALLS: list[tuple[Any, str]] = [
    (PieceStore, "acquire"),
    (PieceStore, "release"),
    (PieceStore, "change"),
    (PieceMover, "apply"),
    (SavedTensors, "pack"),
    (SavedTensors, "unpack"),
]


@pytest.mark.usefixtures("stopped_by_a_signal")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_signal_in_the_midst_of_our_own_work(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, attempts, is_training = 0, 0, False

    def stopping(act: Callable[..., Any]) -> Callable[..., Any]:
        """Five of six attempts at a micro-batch are stopped, each at another place."""

        def acts(*given: Any, **more: Any) -> Any:
            nonlocal calls
            calls += is_training
            if is_training and attempts % 6 and calls == attempts * 37 % 500:
                signal.raise_signal(NUMBER)
            return act(*given, **more)

        return acts

    def begin(model: nn.Module) -> None:
        def forward_begins(*_: object) -> None:
            nonlocal calls, attempts, is_training
            calls, attempts, is_training = 0, attempts + 1, True

        def backward_ends(_: Tensor) -> None:
            nonlocal is_training
            is_training = False

        model.register_forward_pre_hook(forward_begins)
        next(model.parameters()).register_post_accumulate_grad_hook(backward_ends)
        for owner, name in CALLS:
            monkeypatch.setattr(owner, name, stopping(getattr(owner, name)))

    found, stopped = train(tmp_path, POLICIES[policy], begin)
    assert stopped >= 3 * STEPS
    assert_same(found, plain(build("gpt", SHAPE)[0]))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_the_program_raises_in_a_forward_or_in_a_backward(
    policy: str, error: type[BaseException], tmp_path: Path
) -> None:
    calls = 0

    def raises(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls in (3, 9, 16, 30, 55, 70):
            raise error("enough")

    def begin(model: nn.Module) -> None:
        for each in model.children():
            each.register_forward_hook(raises)
        for parameter in list(model.parameters())[::5]:
            parameter.register_hook(raises)

    found, stopped = train(tmp_path, POLICIES[policy], begin)
    assert stopped >= STEPS
    assert_same(found, plain(build("gpt", SHAPE)[0]))
