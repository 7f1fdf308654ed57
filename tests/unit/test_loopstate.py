"""A newcomer's loop continues where the others are: hyperparameters, schedulers of every kind, registered objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elastrain.errors import ConfigError
from elastrain.runtime.loopstate import LoopState, schedulers_of, settings_digest

MAKERS: dict[str, Callable[[torch.optim.Optimizer], list[Any]]] = {
    "cosine": lambda o: [lr_scheduler.CosineAnnealingLR(o, 20)],
    "lambda": lambda o: [lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step))],
    "milestones": lambda o: [lr_scheduler.MultiStepLR(o, [3, 7, 7])],
    "one cycle": lambda o: [lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20)],
    "two chained by hand": lambda o: [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 4)],
    "sequential": lambda o: [
        lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[4]
        )
    ],
}


def _optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.zeros(3))
    return torch.optim.SGD([{"params": [weight], "momentum": 0.9}], lr=0.05)


def _hyper(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _advance(optimizer: torch.optim.Optimizer, schedulers: list[Any], steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.filterwarnings("ignore:.*")
def test_a_newcomers_schedule_goes_on_exactly_where_the_others_are(kind: str) -> None:
    donor, newcomer = _optimizer(), _optimizer()
    donors, newcomers = MAKERS[kind](donor), MAKERS[kind](newcomer)
    giving, taking = LoopState(donor, {}), LoopState(newcomer, {})
    _advance(donor, donors, 6)
    taking.load(giving.take(_hyper(donor)))
    assert newcomer.param_groups[0]["lr"] == donor.param_groups[0]["lr"]
    assert _advance(newcomer, newcomers, 8) == _advance(donor, donors, 8)


def test_schedulers_are_found_by_their_optimizer_only() -> None:
    mine, other = _optimizer(), _optimizer()
    scheduler = lr_scheduler.StepLR(mine, 3)
    kept = lr_scheduler.StepLR(other, 3)
    assert schedulers_of(mine) == [scheduler]
    assert schedulers_of(other) == [kept]


class _Counter:
    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "by name": {3: 0.1, "x": None}, "code": print}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        assert state["by name"] == {3: 0.1, "x": None}
        assert state["code"] is print, "code is never sent: everybody has it from the script"


def test_registered_objects_travel_with_the_loop() -> None:
    ours, theirs = _Counter(), _Counter()
    ours.seen = 41
    optimizer = _optimizer()
    text = LoopState(optimizer, {"counter": ours}).take(_hyper(optimizer))
    LoopState(_optimizer(), {"counter": theirs}).load(text)
    assert theirs.seen == 41


def test_another_script_is_refused() -> None:
    optimizer = _optimizer()
    text = LoopState(optimizer, {"counter": _Counter()}).take(_hyper(optimizer))
    with pytest.raises(ConfigError, match="same script"):
        LoopState(_optimizer(), {}).load(text)


def test_settings_digest_sees_every_bit_of_a_rate() -> None:
    rate = 0.1
    assert settings_digest([{"lr": rate}]) == settings_digest([{"lr": 0.1}])
    assert settings_digest([{"lr": rate}]) != settings_digest([{"lr": rate + 2**-56}])
